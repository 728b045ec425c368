"""Prefill kernels on a GPU against float64: ragged and chunked batches, options, layouts, poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu_checks import exact, relative_error

from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends import triton_prefill
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference import paged
from tandem.kernels.triton_kernels.prefill import unpack_prefix
from tests.fakes.guarded_memory import guarded_copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
RAGGED = ((2, 63, 64, 65, 127, 128, 129, 300, 1, 513), (2, 63, 64, 65, 127, 128, 129, 300, 1, 513))
CHUNKED = ((1, 1, 64, 63, 129, 128, 300, 7, 256), (1, 130, 128, 191, 130, 1000, 555, 71, 1281))
BATCHES: dict[str, tuple[Sequence[int], Sequence[int]]] = {"ragged": RAGGED, "chunked": CHUNKED}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 200},
    "window-1": {"sliding_window": 1},
    "soft-cap": {"logits_soft_cap": 5.0},
    "window-soft-cap": {"sliding_window": 64, "logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(8))},
    "all": {"alibi_slopes": torch.tensor(paged.alibi_slopes(8)), "sliding_window": 300, "logits_soft_cap": 3.0},
}


def rows_without_prefix(lengths: Sequence[int]) -> RowBatch:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 64, "block_size": 64, "device": "cuda"}
    return random_batch(lengths, lengths, dtype=torch.bfloat16, **sizes).metadata.all_rows()


def check(batch: PagedBatch, spec: AttentionSpec, *scales: float, hopper: bool = True) -> None:
    new = batch.prefill(*scales)
    reason = triton_prefill.why_general(new, spec)
    if torch.cuda.get_device_capability() == (9, 0):
        assert (reason is None) == hopper, reason
    output = TritonOps.prefill(new, spec)
    expected = exact(batch, spec, *scales)
    assert not triton_prefill._failures
    assert output.isfinite().all()
    tolerance = TOLERANCE[batch.query.dtype]
    assert relative_error(output, expected) < tolerance
    worst = (output.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert worst.max().item() < 3 * tolerance  # each token, so that a wrong row can't hide among many


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_batches(lengths: str, options: str, dtype: torch.dtype) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda", "seed": 1}
    check(
        random_batch(*BATCHES[lengths], dtype=dtype, **sizes), AttentionSpec(8, 128, 128**-0.5, 2, **OPTIONS[options])
    )


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [
    (4, 4, 128, 16), (4, 1, 64, 64), (6, 2, 64, 32), (4, 2, 128, 128), (5, 1, 128, 48), (32, 8, 128, 64),
])  # fmt: skip
def test_shapes(heads: int, kv_heads: int, size: int, block: int) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "block_size": block, "device": "cuda"}
    batch = random_batch(*CHUNKED, dtype=torch.bfloat16, **sizes)
    check(batch, AttentionSpec(heads, size, size**-0.5, kv_heads))


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_at_other_head_sizes(options: str, size: int) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": size, "block_size": 16, "device": "cuda", "seed": 2}
    batch = random_batch(*CHUNKED, dtype=torch.bfloat16, **sizes)
    check(batch, AttentionSpec(8, size, size**-0.5, 2, **OPTIONS[options]))


@pytest.mark.parametrize("size", [128, 256])
def test_programs_that_take_many_items(size: int) -> None:
    """More than ten items a program, of every length, so that what one leaves behind would meet the next."""
    lengths = (2500, 17, 1300, 128, 640, 1, 129, 2047)
    earlier = (0, 300, 64, 1000, 1, 0, 0, 129)
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_size": size, "block_size": 64, "device": "cuda", "seed": 4}
    totals = tuple(new + old for new, old in zip(lengths, earlier, strict=True))
    check(random_batch(lengths, totals, dtype=torch.bfloat16, **sizes), AttentionSpec(32, size, size**-0.5, 8))


def test_rows_without_new_tokens() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    spec = AttentionSpec(8, 128, 128**-0.5, 2)
    batch = random_batch((0, 130, 0, 2, 0), (70, 200, 0, 2, 64), dtype=torch.bfloat16, **sizes)
    check(batch, spec)
    nothing = random_batch((0, 0), (70, 0), dtype=torch.bfloat16, **sizes)
    assert TritonOps.prefill(nothing.prefill(), spec).shape == (0, 8, 128)


@pytest.mark.parametrize("size", [80, 96, 256])
def test_other_head_sizes(size: int) -> None:
    """80 and 96 as 128 columns, the last of them zeros; 256 with half as many keys a tile."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": size, "block_size": 64, "device": "cuda"}
    for lengths in (RAGGED, CHUNKED):
        batch = random_batch(*lengths, dtype=torch.bfloat16, **sizes)
        check(batch, AttentionSpec(4, size, 0.1, 2))


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(8, 2, 128, 64), (8, 8, 64, 16), (8, 1, 96, 48)])
@pytest.mark.parametrize("options", ["plain", "window", "all"])
def test_prefixes_in_fp8(
    options: str, heads: int, kv_heads: int, size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack_prefix, "WORTHWHILE_QUERIES", 0)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "block_size": block, "device": "cuda"}
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads, kv_cache_dtype="fp8", **OPTIONS[options])
    for lengths in (RAGGED, CHUNKED):
        batch = random_batch(*lengths, dtype=torch.bfloat16, cache_dtype=FP8_DTYPE, **sizes)
        check(batch, spec, 0.5, 0.25)


def test_few_queries_read_fp8_themselves() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    spec = AttentionSpec(8, 128, 128**-0.5, 2, kv_cache_dtype="fp8")
    batch = random_batch((10, 3), (3000, 800), dtype=torch.bfloat16, cache_dtype=FP8_DTYPE, **sizes)
    for _ in range(2):  # the first call runs both kernels
        batch.metadata.scratch.clear()
        check(batch, spec, 0.5, 0.25)
    kept = batch.metadata.all_rows().scratch
    assert [kept[key] for key in kept if key[0] == "unpacked_prefixes"] == [None]


def test_without_a_cache() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    batch = random_batch(*RAGGED, dtype=torch.bfloat16, **sizes)
    spec = AttentionSpec(8, 128, 0.1, 2)
    output = TritonOps.prefill(batch.prefill()._replace(kv=None), spec)
    assert relative_error(output, exact(batch, spec)) < TOLERANCE[torch.bfloat16]


def test_slices_of_a_fused_projection() -> None:
    """Queries, keys and values are columns of one matrix, as models pass them; a row full of NaN harms no other."""
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    batch = random_batch((100, 3, 130), (164, 40, 200), dtype=torch.bfloat16, **sizes)
    fused = torch.cat((batch.query, batch.key, batch.value), dim=1)
    query, key, value = fused.split((8, 2, 2), dim=1)
    spec, rows = AttentionSpec(8, 128, 0.1, 2), batch.metadata.all_rows()
    expected = exact(batch, spec)
    fused[100:103] = float("nan")
    output = TritonOps.prefill(Prefill(query, key, value, batch.kv(), rows), spec)
    assert output[100:103].isnan().all()
    for others in (slice(0, 100), slice(103, None)):
        assert relative_error(output[others], expected[others]) < TOLERANCE[torch.bfloat16]


def test_unaligned_rows_take_the_general_kernel() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 64, "device": "cuda"}
    batch = random_batch(*CHUNKED, dtype=torch.bfloat16, **sizes)
    spec = AttentionSpec(4, 64, 0.1, 2)
    wide = torch.nn.functional.pad(batch.query.flatten(1), (1, 2))[:, 1:-2].unflatten(1, (4, 64))
    new = batch.prefill()._replace(q=wide)
    assert "16 bytes" in (triton_prefill.why_general(new, spec) or "")
    output = TritonOps.prefill(new, spec)
    assert relative_error(output, exact(batch, spec)) < TOLERANCE[torch.bfloat16]


def test_offsets_beyond_2_to_the_31() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    first = (1 << 31) // (2 * 2 * 2 * 64 * 128) + 1
    batch = random_batch((100, 65), (400, 65), dtype=torch.bfloat16, first_block=first, **sizes)
    assert batch.pool.numel() > 1 << 31
    check(batch, AttentionSpec(8, 128, 0.1, 2))


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("block", "size"), [(16, 128), (64, 128), (64, 256)])
def test_touches_no_memory_around_its_tensors(block: int, size: int, at_end: bool) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_size": size, "block_size": block, "device": "cuda", "seed": 5}
    batch = random_batch((1, 2, 65, 200, 3), (1, 70, 100, 1000, 15), dtype=torch.bfloat16, **sizes)
    spec, rows = AttentionSpec(4, size, size**-0.5, 1), batch.metadata.all_rows()
    query, key, value, layer = (
        guarded_copy(tensor, at_end=at_end)
        for tensor in (batch.query, batch.key, batch.value, batch.kv_layer.contiguous())
    )
    output = TritonOps.prefill(Prefill(query, key, value, PagedKV.of_layer(layer), rows), spec)
    assert relative_error(output, exact(batch, spec)) < TOLERANCE[torch.bfloat16]
    output = TritonOps.prefill(Prefill(query, key, value, None, rows_without_prefix((1, 2, 65, 200, 3))), spec)
    assert output.isfinite().all()


def test_131072_tokens() -> None:
    """The last queries of a whole long prompt, and their chunk over a prefix, against float64."""
    total, last = 131072, 16
    generator = torch.Generator("cuda").manual_seed(3)
    query, key, value = (
        torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for heads in (2, 1, 1)
    )
    spec = AttentionSpec(2, 128, 128**-0.5, 1)
    scores = torch.einsum("qhd,kd->hqk", query[-last:].double(), key[:, 0].double()) * spec.scale
    hidden = torch.ones(last, total, dtype=torch.bool, device="cuda").triu(total - last + 1)
    expected = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value[:, 0].double())
    from tandem.kernels.api.metadata import AttentionMetadataBuilder

    build = AttentionMetadataBuilder().build
    table = [torch.randperm(total // 64).tolist()]
    device = query.device
    whole = build([total], [total], table, [-1] * total, device).all_rows()
    output = TritonOps.prefill(Prefill(query, key, value, None, whole), spec)
    assert output.isfinite().all()
    assert relative_error(output[-last:], expected) < 1e-2
    pool = torch.full((total // 64, 1, 2, 64, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    earlier = total - 1000
    blocks = torch.tensor(table[0], device="cuda")
    position = torch.arange(earlier, device="cuda")
    pool[blocks[position // 64], 0, 0, position % 64] = key[:earlier, 0]
    pool[blocks[position // 64], 0, 1, position % 64] = value[:earlier, 0]
    chunk = build([1000], [total], table, [-1] * 1000, device).all_rows()
    output = TritonOps.prefill(
        Prefill(query[earlier:], key[earlier:], value[earlier:], PagedKV.of_layer(pool), chunk), spec
    )
    assert output.isfinite().all()
    assert relative_error(output[-last:], expected) < 1e-2


def test_lengths_compile_nothing() -> None:
    from tandem.kernels.check.compilations import CompilationCounter

    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
    spec = AttentionSpec(8, 128, 0.1, 2)
    check(random_batch((100, 3), (164, 40), dtype=torch.bfloat16, **sizes), spec)
    counter = CompilationCounter()
    for lengths in (RAGGED, CHUNKED, ((16,), (16,)), ((1,), (4096,)), ((129, 2, 2, 2), (129, 1000, 16, 17))):
        check(random_batch(*lengths, dtype=torch.bfloat16, **sizes), spec)
    batch = random_batch((1, 1, 1, 40), (9, 9, 9, 80), dtype=torch.bfloat16, **sizes)
    rest = TritonOps.prefill(
        Prefill(batch.query[3:], batch.key[3:], batch.value[3:], batch.kv(), batch.metadata.prefill_rows()), spec
    )
    assert rest.isfinite().all()
    assert counter.num_total == 0
