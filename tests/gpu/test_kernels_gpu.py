"""Kernels on a GPU against float64: every backend that is available, wide offsets, graphs, fp8, copies, digests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.selection import NAMES, rank_backends, select_backend
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.cache_ops import copy_blocks
from tandem.kernels.blocks.digest import block_digests
from tandem.kernels.blocks.quantization import FP8_DTYPE, overflow_counts
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference import paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 64, "device": "cuda"}
SLOPES = torch.tensor(paged.alibi_slopes(32))
SINKS = torch.linspace(-5.0, 9.0, 32)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 200},
    "soft-cap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": SLOPES},
    "chunk": {"attention_chunk": 192},
    "sinks": {"sinks": SINKS},
    "window-sinks": {"sliding_window": 128, "sinks": SINKS.bfloat16()},
}
MIXED = ((1, 1, 1, 300, 1, 77, 128), (1000, 1, 64, 1324, 130, 77, 4000))


def exact(batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """float64 by the native backend (which the CPU tests hold to the reference), on the same stored values."""
    meta, split = batch.metadata, batch.metadata.num_decode_rows
    query, key, value = batch.query.double(), batch.key.double(), batch.value.double()
    decoded = NativeOps.decode(query[:split], batch.kv(), meta.decode_rows(), spec)
    if split == meta.num_rows:
        return decoded
    rest = NativeOps.prefill(Prefill(query[split:], key[split:], value[split:], batch.kv(), meta.prefill_rows()), spec)
    return torch.cat((decoded, rest))


def check(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def layer_for(spec: AttentionSpec, backend: str) -> Attention:
    return Attention(
        spec.num_heads, spec.head_size, spec.scale, spec.num_kv_heads, spec.alibi_slopes, spec.sliding_window,
        spec.logits_soft_cap, spec.kv_cache_dtype, attn_backend=backend, attention_chunk=spec.attention_chunk,
        sinks=spec.sinks,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", [name for name in NAMES if name != "native"])
def test_mixed_batches(backend: str, dtype: torch.dtype, options: str) -> None:
    spec = AttentionSpec(32, 128, 128**-0.5, 8, **OPTIONS[options])
    _, reasons = rank_backends("cuda", dtype, 128, spec)
    if backend in reasons:
        pytest.skip(reasons[backend])
    batch = random_batch(*MIXED, dtype=dtype, **SIZES)
    layer = layer_for(spec, backend)
    output = layer._impl_of(select_backend("cuda", dtype, 128, spec, backend)[0]).forward(
        layer, batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata
    )
    check(output, exact(batch, spec), TOLERANCE[dtype])


@pytest.mark.parametrize("backend", [name for name in NAMES if name != "native"])
def test_prompts_without_prefix(backend: str) -> None:
    spec = AttentionSpec(32, 128, 128**-0.5, 8)
    _, reasons = rank_backends("cuda", torch.bfloat16, 128, spec)
    if backend in reasons:
        pytest.skip(reasons[backend])
    batch = random_batch((600, 5, 64), (600, 5, 64), dtype=torch.bfloat16, **SIZES)
    layer = layer_for(spec, backend)
    output = layer(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    check(output, exact(batch, spec), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [64, 80, 96, 256])
def test_other_head_sizes(size: int, dtype: torch.dtype) -> None:
    sizes = {**SIZES, "num_heads": 6, "num_kv_heads": 2, "head_size": size, "block_size": 16}
    batch = random_batch((1, 40, 130), (600, 90, 130), dtype=dtype, **sizes)
    spec = AttentionSpec(6, size, size**-0.5, 2)
    output = layer_for(spec, "triton")(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    check(output, exact(batch, spec), TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 40])
def test_decode_of_few_and_of_many_rows(num_rows: int) -> None:
    """One row and 40, of ragged lengths up to 6,000 tokens: V2, which serves every layer of 16 bits like this one."""
    lengths = tuple((row * 977) % 6000 + 1 for row in range(1, num_rows + 1))
    batch = random_batch((1,) * num_rows, lengths, dtype=torch.bfloat16, **SIZES)
    spec = AttentionSpec(32, 128, 128**-0.5, 8)
    output = layer_for(spec, "triton")(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    check(output, exact(batch, spec), TOLERANCE[torch.bfloat16])


def test_offsets_beyond_2_to_the_31() -> None:
    block_elements = 8 * 2 * 2 * 64 * 128
    batch = random_batch(
        (1, 100), (500, 400), dtype=torch.bfloat16, first_block=(1 << 31) // block_elements + 1, **SIZES
    )
    assert batch.pool.numel() > 1 << 31
    spec = AttentionSpec(32, 128, 128**-0.5, 8)
    output = layer_for(spec, "triton")(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    check(output, exact(batch, spec), TOLERANCE[torch.bfloat16])
    source = batch.block_tables[0][0]
    used = {block for table in batch.block_tables for block in table}
    spare = max(set(range(batch.pool.shape[0])) - used)
    copy_blocks(batch.pool, [source], [spare], 64)
    assert torch.equal(batch.pool[spare].view(torch.int16), batch.pool[source].view(torch.int16))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="fp8 needs compute capability 8.9"
)
def test_fp8_cache() -> None:
    batch = random_batch(*MIXED, dtype=torch.bfloat16, cache_dtype=FP8_DTYPE, **SIZES)
    spec = AttentionSpec(32, 128, 128**-0.5, 8, kv_cache_dtype="fp8")
    output = layer_for(spec, "triton")(
        batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata, k_scale=0.5, v_scale=0.25
    )
    meta, split = batch.metadata, batch.metadata.num_decode_rows
    query, key, value = batch.query.double(), batch.key.double(), batch.value.double()
    decoded = NativeOps.decode(query[:split], batch.kv(0.5, 0.25), meta.decode_rows(), spec)
    rest = NativeOps.prefill(
        Prefill(query[split:], key[split:], value[split:], batch.kv(0.5, 0.25), meta.prefill_rows()), spec
    )
    check(output, torch.cat((decoded, rest)), TOLERANCE[torch.bfloat16])


def test_fp8_writes_match_native_bit_for_bit_and_count() -> None:
    layers = []
    key = torch.randn(50, 8, 128, device="cuda", dtype=torch.bfloat16) * 300
    slots = torch.randperm(256, device="cuda")[:50]
    slots[7] = -1
    counts = []
    for ops in (TritonOps, NativeOps):
        batch = random_batch((1,), (64,), dtype=torch.bfloat16, cache_dtype=FP8_DTYPE, **SIZES)
        pool = torch.zeros(4, 8, 2, 64, 128, dtype=torch.uint8, device="cuda").view(FP8_DTYPE)
        kv = batch.kv(0.5, 2.0)._replace(key_cache=pool[:, :, 0], value_cache=pool[:, :, 1])
        before = overflow_counts().get(str(key.device), 0)
        ops.write(key, key, kv, slots)
        counts.append(overflow_counts()[str(key.device)] - before)
        layers.append(pool.view(torch.uint8))
    assert counts[0] == counts[1] > 0
    assert torch.equal(*layers)


@pytest.mark.parametrize("options", ["plain", "chunk", "window-sinks"])
def test_decode_replays_in_a_cuda_graph(options: str) -> None:
    batch = random_batch((1,) * 8, tuple(range(100, 900, 100)), dtype=torch.bfloat16, **SIZES)
    spec = AttentionSpec(32, 128, 128**-0.5, 8, **OPTIONS[options])
    layer = layer_for(spec, "triton")
    layer.bind(batch.kv_layer)
    arguments = (batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    expected = layer(*arguments).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*arguments)
    batch.query.copy_(batch.query.flip(0).clone())
    graph.replay()
    check(output, exact(batch, spec), TOLERANCE[torch.bfloat16])
    assert not torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8_DTYPE])
def test_block_operations_match_the_cpu(dtype: torch.dtype) -> None:
    pool = torch.randn(9, 2, 3, 2, 64, 80).to(dtype)
    on_gpu = pool.cuda()
    copy_blocks(pool, [0, 4], [8, 2], [64, 33])
    copy_blocks(on_gpu, [0, 4], [8, 2], [64, 33])
    assert torch.equal(pool.view(torch.uint8), on_gpu.cpu().view(torch.uint8))
    ids = [3, 8, 0, 2]
    assert torch.equal(block_digests(pool, ids, 77, 41, 64), block_digests(on_gpu, ids, 77, 41, 64).cpu())


def test_the_table_picks_a_gpu_backend() -> None:
    spec = AttentionSpec(32, 128, 128**-0.5, 8)
    backend, _ = select_backend("cuda", torch.bfloat16, 128, spec)
    assert backend.get_name() != "NATIVE"


def test_rows_without_tokens_give_zeros() -> None:
    batch = random_batch((1, 1), (70, 5), dtype=torch.bfloat16, **SIZES)
    TritonOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    rows: RowBatch = replace(batch.metadata.decode_rows(), seq_lens=torch.tensor([70, 0], dtype=torch.int32).cuda())
    output = TritonOps.decode(batch.query, batch.kv(), rows, AttentionSpec(32, 128, 0.1, 8))
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert output.isfinite().all()
