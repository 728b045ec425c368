"""What captured attention reads on the device, kernels interpreted: steps of any lengths by buffers of one size.

The Hopper kernel has no interpreter: in its place each piece of work is computed as its fields say. On a GPU:
tests/gpu/test_captured_attention_gpu.py. Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.engine.scheduling.times.prompt_budget import GRAPH_PROMPTS, GRAPH_STREAMS
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.spec import Reach
from tandem.kernels.backends import triton_captured
from tandem.kernels.backends.triton_captured import (
    MOST_PROMPTS,
    MOST_READ_AGAIN,
    MOST_ROWS,
    TritonCapturedAttention,
)
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.prefixes.shared_prefix import PrefixBuffers
from tandem.kernels.reference import paged

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 16
ROWS, TOKENS, LENGTH = 6, 200, 320


def compute_pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    block_tables: torch.Tensor, work: torch.Tensor, scale: float, *, reach: Reach, out: torch.Tensor, **options: Any
) -> None:  # fmt: skip
    assert reach == Reach()
    assert all(option is None for option in options.values())
    whole: dict[int, torch.Tensor] = {}  # of a row, of which each tile takes its part
    for row, tile, first, new, earlier in work[:, :5].tolist():
        begin, end = 128 * tile, min(128 * (tile + 1), new)
        if begin < end:
            row_of = slice(first, first + new)
            if row not in whole:
                blocks = [block_tables[row].tolist()]
                whole[row] = paged.paged_prefill(
                    query[row_of], key[row_of], value[row_of], key_cache, value_cache, blocks, (new,),
                    (earlier + new,), scale,
                )  # fmt: skip
            out[first + begin : first + end] = whole[row][begin:end].to(out.dtype)


@pytest.fixture(autouse=True)
def _pieces_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_captured, "launch_prefill", compute_pieces)
    monkeypatch.setattr(triton_captured, "why_general", lambda *_: None)


def layer_over(pool: torch.Tensor) -> Attention:
    layer = Attention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_backend="TRITON")
    layer.bind(pool[:, :, 1])
    return layer


def batch_of(query_lens: Sequence[int], seq_lens: Sequence[int], seed: int) -> PagedBatch:
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK}
    return random_batch(query_lens, seq_lens, seed=seed, **sizes)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """What stands behind the tokens of a step is of earlier steps."""
    return torch.cat((tensor, torch.full((TOKENS - len(tensor), *tensor.shape[1:]), float("nan"))))


STEPS = [
    ((1, 1, 5, 130), (40, 1, 5, 170)),
    ((200,), (320,)),
    ((1, 1, 1, 1, 1, 1, 2), (3, 20, 16, 17, 90, 1, 33)),
    ((1,), (300,)),
]


def test_one_set_of_buffers_serves_steps_of_any_lengths() -> None:
    batches = [batch_of(*lengths, seed) for seed, lengths in enumerate(STEPS)]
    pool = torch.zeros_like(max((each.pool for each in batches), key=len))
    layer = layer_over(pool)
    captured = TritonCapturedAttention([layer], ROWS, TOKENS, LENGTH)
    for batch in batches:
        pool[: len(batch.pool)] = batch.pool
        meta = batch.metadata
        assert captured.takes(meta)
        slots = torch.full((TOKENS,), -1)
        slots[: meta.num_tokens] = meta.slot_mapping
        of_graph = replace(meta, slot_mapping=slots)
        tables = torch.zeros((meta.num_rows, LENGTH // BLOCK), dtype=torch.int32)
        tables[:, : meta.block_tables.shape[1]] = meta.block_tables
        captured.fill(replace(meta, block_tables=tables))
        captured.begin()
        new = [padded(each) for each in (batch.query, batch.key, batch.value)]
        outs = [captured.attend(layer, *new, of_graph, stored)[: meta.num_tokens].clone() for stored in (False, True)]
        expected = replace(batch, pool=pool).expected(layer.spec)  # slow
        for kv_is_stored, out in enumerate(outs):
            error = (out.double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, (meta.query_lens_cpu, kv_is_stored)


def test_rows_beyond_its_room_are_not_taken() -> None:
    captured = TritonCapturedAttention([layer_over(torch.zeros(4, KV_HEADS, 2, 2, BLOCK, SIZE))], ROWS, TOKENS, LENGTH)
    assert captured.takes(batch_of((1,) * ROWS + (2,) * MOST_PROMPTS, (2,) * (ROWS + MOST_PROMPTS), 0).metadata)
    assert not captured.takes(batch_of((1,) * (ROWS + 1) + (2,), (2,) * (ROWS + 2), 0).metadata)
    assert not captured.takes(batch_of((2,) * (MOST_PROMPTS + 1), (2,) * (MOST_PROMPTS + 1), 0).metadata)


def test_rows_that_share_much_are_not_taken() -> None:
    captured = TritonCapturedAttention([layer_over(torch.zeros(4, KV_HEADS, 2, 2, BLOCK, SIZE))], ROWS, TOKENS, LENGTH)
    meta, shared = batch_of((1, 1, 5), (40, 40, 5), 0).metadata, PrefixBuffers(ROWS, 2, torch.device("cpu")).prefixes
    assert captured.takes(replace(meta, shared_prefixes=replace(shared, saved_bytes=MOST_READ_AGAIN)))
    assert not captured.takes(replace(meta, shared_prefixes=replace(shared, saved_bytes=MOST_READ_AGAIN + 1)))


def test_steps_are_planned_for_this_room() -> None:
    assert (GRAPH_STREAMS, GRAPH_PROMPTS) == (MOST_ROWS, MOST_PROMPTS)
