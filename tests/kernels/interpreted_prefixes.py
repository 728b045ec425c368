"""Decode over shared prefixes under Triton's interpreter against the float64 reference.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends import triton_decode
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.sample_batches import PagedBatch, random_batch, share_prefix
from tandem.kernels.prefixes.prefix_groups import PrefixGroup
from tandem.kernels.prefixes.shared_prefix import PrefixBuffers, SharedPrefixes
from tandem.kernels.reference import paged

LENGTHS = (150, 130, 129, 70, 200, 1, 90)
GROUPS = (((0, 1, 2), 8), ((3, 4), 4))  # rows, shared blocks of 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft-cap and alibi": {"logits_soft_cap": 1.5, "alibi_slopes": torch.tensor(paged.alibi_slopes(4))},
    "sinks": {"sinks": torch.tensor([0.5, -300.0, 9.0, 0.0])},
}


def sharing_batch(**sizes: Any) -> PagedBatch:
    batch = random_batch((1,) * len(LENGTHS), LENGTHS, **sizes)
    for rows, num_blocks in GROUPS:
        share_prefix(batch, rows, num_blocks)
    TritonOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    return batch


def groups_of(entries: Sequence[tuple[Sequence[int], int]]) -> list[PrefixGroup]:
    return [PrefixGroup(np.array(rows), num_blocks) for rows, num_blocks in entries]


def decode(batch: PagedBatch, spec: AttentionSpec, prefixes: SharedPrefixes, *scales: float) -> torch.Tensor:
    rows = replace(batch.metadata.all_rows(), shared_prefixes=prefixes, scratch={})
    return triton_decode.decode(batch.query, batch.kv(*scales), rows, spec)


@pytest.mark.parametrize(("options", "members"), [("plain", 2), ("soft-cap and alibi", 16), ("sinks", 3)])
def test_rows_of_groups_and_rows_alone(options: str, members: int) -> None:
    """Chunks that a group fills, one that it doesn't, and groups cut into several."""
    batch = sharing_batch()
    spec = AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options])
    buffers = PrefixBuffers(9, members, torch.device("cpu"))
    buffers.load(groups_of(GROUPS), 16)
    output = decode(batch, spec, buffers.prefixes.first(7))
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block"), [(3, 1, 80, 16), (2, 2, 96, 32), (18, 1, 32, 64), (4, 2, 16, 48)]
)
def test_sizes(heads: int, kv_heads: int, size: int, block: int) -> None:
    batch = random_batch(
        (1,) * 3, (250, 20, 200), num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=block
    )
    num_blocks = 192 // block
    share_prefix(batch, (2, 0), num_blocks)
    TritonOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads)
    buffers = PrefixBuffers(3, 2, torch.device("cpu"))
    buffers.load(groups_of([((2, 0), num_blocks)]), block)
    output = decode(batch, spec, buffers.prefixes)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_fp8_cache(dtype: torch.dtype, tolerance: float) -> None:
    batch = random_batch((1,) * 3, (150, 130, 131), dtype=dtype, cache_dtype=FP8_DTYPE)
    share_prefix(batch, (0, 1, 2), 8)
    TritonOps.write(batch.key, batch.value, batch.kv(0.5, 0.25), batch.metadata.slot_mapping)
    batch.query[0, 0] *= 1e-4
    batch.query[1, 1] *= 300.0
    spec = AttentionSpec(4, 16, 0.3, 2, kv_cache_dtype="fp8")
    buffers = PrefixBuffers(3, 16, torch.device("cpu"))
    buffers.load(groups_of([((0, 1, 2), 8)]), 16)
    output = decode(batch, spec, buffers.prefixes, 0.5, 0.25)
    torch.testing.assert_close(output.double(), batch.expected(spec, 0.5, 0.25), rtol=tolerance, atol=tolerance)


def test_a_prefix_is_read_through_its_first_rows_table_only() -> None:
    batch = sharing_batch()
    spec, kv = AttentionSpec(4, 16, 0.3, 2), batch.kv()
    buffers = PrefixBuffers(7, 16, torch.device("cpu"))
    buffers.load(groups_of(GROUPS), 16)
    decode(batch, spec, buffers.prefixes)  # a first call runs the other versions, too, on tables that are whole
    for rows, num_blocks in GROUPS:
        batch.metadata.block_tables[list(rows[1:]), :num_blocks] = -(1 << 20)  # reading there would crash
        for row in rows[1:]:
            batch.block_tables[row][:num_blocks] = [-(1 << 20)] * num_blocks
    expected = paged.shared_prefix_decode(
        batch.query.double(), kv.key_cache, kv.value_cache, batch.block_tables, LENGTHS, spec.scale, GROUPS
    )
    torch.testing.assert_close(decode(batch, spec, buffers.prefixes).double(), expected, rtol=3e-6, atol=3e-6)


def test_groups_change_and_vanish_in_buffers_that_stay() -> None:
    batch = sharing_batch()
    spec = AttentionSpec(4, 16, 0.3, 2)
    expected = batch.expected(spec)
    buffers = PrefixBuffers(7, 16, torch.device("cpu"))
    address = buffers.prefixes.chunk_lens.data_ptr()
    for entries in (GROUPS, (), GROUPS[1:], (((1, 2), 4), ((4, 3), 4))):
        buffers.load(groups_of(entries), 16)
        output = decode(batch, spec, buffers.prefixes)
        torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)
    assert buffers.prefixes.chunk_lens.data_ptr() == address


@pytest.mark.parametrize("option", ["sliding_window", "attention_chunk"])
def test_layers_with_a_window_read_for_themselves(option: str) -> None:
    batch = sharing_batch()
    spec = AttentionSpec(4, 16, 0.3, 2, **{option: 30})
    buffers = PrefixBuffers(7, 16, torch.device("cpu"))
    buffers.load(groups_of(GROUPS), 16)
    output = decode(batch, spec, buffers.prefixes)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)
