"""Triton kernels under Triton's interpreter against the float64 reference.

Not collected by name: the interpreter is chosen when triton is first imported, so test_triton_interpreter.py runs this
file in a process of its own with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE, dequantize, overflow_counts
from tandem.kernels.check.sample_batches import random_batch
from tandem.kernels.reference import paged
from tandem.kernels.triton_kernels.blocks.cache_write import cache_write
from tandem.kernels.triton_kernels.blocks.copy_blocks import copy_blocks
from tandem.kernels.triton_kernels.prefill.unpack_prefix import UnpackedPrefixes

ONE = torch.ones(1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "soft-cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(4))},
    "chunk-sinks": {"attention_chunk": 12, "sinks": torch.tensor([0.5, -300.0, 9.0, 0.0])},
    "all": {
        "logits_soft_cap": 2.0,
        "alibi_slopes": torch.tensor(paged.alibi_slopes(4)),
        "sinks": torch.zeros(4),
        "sliding_window": 20,
    },
}


def layer_for(spec: AttentionSpec) -> Attention:
    return Attention(
        spec.num_heads, spec.head_size, spec.scale, spec.num_kv_heads, spec.alibi_slopes, spec.sliding_window,
        spec.logits_soft_cap, spec.kv_cache_dtype, attn_backend="triton", attention_chunk=spec.attention_chunk,
        sinks=spec.sinks,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_mixed_batch_through_the_layer(options: str) -> None:
    batch = random_batch((1, 1, 9, 1, 20), (30, 2, 25, 18, 20))
    spec = AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options])
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(3, 1, 80, 16), (2, 2, 96, 48), (18, 1, 32, 64)])
def test_padded_head_sizes_groups_and_block_sizes(heads: int, kv_heads: int, size: int, block: int) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "block_size": block}
    batch = random_batch((1, 3), (50, 20), **sizes)
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads)
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    batch = random_batch((1, 5), (20, 21), dtype=dtype)
    spec = AttentionSpec(4, 16, 0.3, 2)
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=2e-2, atol=2e-2)


def test_fp8_cache() -> None:
    batch = random_batch((1, 5), (20, 21), cache_dtype=FP8_DTYPE)
    spec = AttentionSpec(4, 16, 0.3, 2, kv_cache_dtype="fp8")
    layer = layer_for(spec)
    output = layer(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata, 0.5, 0.25)
    torch.testing.assert_close(output.double(), batch.expected(spec, 0.5, 0.25), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8_DTYPE])
def test_write_skips_negative_slots_saturates_and_counts(cache_dtype: torch.dtype) -> None:
    """Values are exact in fp8: the interpreter's rounding drops the carry into the exponent."""
    key = torch.tensor([1.0, -2.0, 96.0, 240.0, 500.0, -1e9]).repeat(4, 2, 2)
    value = key.flip(-1)
    slots = torch.tensor([33, -1, 0, 17])
    caches = [torch.zeros(3, 2, 2, 16, 12).to(cache_dtype) for _ in range(2)]
    overflow = torch.zeros(1, dtype=torch.int64)
    half, double = torch.tensor([0.5]), torch.tensor([2.0])
    ours, exact = ((cache[:, :, 0], cache[:, :, 1]) for cache in caches)
    cache_write(key, value, *ours, slots, k_scale=half, v_scale=double, overflow=overflow)
    saturated = paged.write_to_paged_cache(key, value, *exact, slots.tolist(), 0.5, 2.0)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    assert int(overflow) == saturated
    assert (saturated > 0) == (cache_dtype == FP8_DTYPE)


def test_overflow_reaches_the_process_counter() -> None:
    batch = random_batch((2,), (2,), cache_dtype=FP8_DTYPE)
    before = overflow_counts().get("cpu", 0)
    TritonOps.write(batch.key * 0 + 1e4, batch.value * 0, batch.kv(), batch.metadata.slot_mapping)
    assert overflow_counts()["cpu"] - before == batch.key.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8_DTYPE])
def test_copy_blocks(dtype: torch.dtype) -> None:
    pool = torch.randn(5, 2, 3, 2, 16, 24).to(dtype)
    expected = pool.clone().view(torch.uint8)
    copy_blocks(pool, [0, 1], [3, 4], [5, 16])
    paged.copy_blocks(expected, [0, 1], [3, 4], [5, 16])
    assert torch.equal(pool.view(torch.uint8), expected)


@pytest.mark.parametrize(("size", "block"), [(80, 16), (128, 64)])
def test_unpacked_prefixes_hold_what_the_cache_holds(size: int, block: int) -> None:
    new, total = (5, 3, 0, 7), (5, 40, 16, 135)
    sizes = {"num_kv_heads": 2, "head_size": size, "block_size": block, "cache_dtype": FP8_DTYPE}
    batch = random_batch(new, total, **sizes)
    kv = batch.kv()
    prefixes = UnpackedPrefixes.allocate(new, total, kv.key_cache, torch.float16)
    prefixes.fill(kv.key_cache, kv.value_cache, batch.metadata.block_tables, torch.tensor([0.5]), torch.tensor([3.0]))
    for row, table in enumerate(batch.block_tables):
        for column in range(-(-(total[row] - new[row]) // block)):
            used = min(block, total[row] - new[row] - column * block)
            unpacked = prefixes.pool[prefixes.block_tables[row, column]][:, :, :used]
            stored = batch.kv_layer[table[column]][:, :, :used]
            assert torch.equal(unpacked[:, 0], dequantize(stored[:, 0], 0.5, torch.float16))
            assert torch.equal(unpacked[:, 1], dequantize(stored[:, 1], 3.0, torch.float16))


def test_wrong_arguments_are_refused_before_the_launch() -> None:
    batch = random_batch((1,), (5,))
    kv = batch.kv()
    with pytest.raises(ValueError, match="contiguous"):
        cache_write(
            batch.key.transpose(1, 2).contiguous().transpose(1, 2), batch.value, kv.key_cache, kv.value_cache,
            batch.metadata.slot_mapping, k_scale=ONE, v_scale=ONE, overflow=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
    with pytest.raises(ValueError, match="slot_mapping"):
        TritonOps.write(batch.key, batch.value, kv, torch.zeros(3, dtype=torch.int64))
