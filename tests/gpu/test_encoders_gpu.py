"""Encoders', cross and block-sparse attention of our kernels on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.api.backend import Prefill
from tandem.kernels.api.metadata import AttentionMetadataBuilder
from tandem.kernels.api.spec import AttentionSpec, AttentionType, BlockSparse
from tandem.kernels.backends import triton_prefill
from tandem.kernels.backends.native import NativeImpl, NativeOps
from tandem.kernels.backends.triton import TritonImpl, TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.sample_batches import random_batch
from tandem.kernels.reference import paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 64, "device": "cuda"}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = (1, 63, 64, 65, 128, 129, 300, 1000)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft-cap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(8))},
    "window": {"sliding_window": 100},
}


def check(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """As a whole and each token, so that a wrong row can't hide among many. Leaves NaN behind, where the next output
    will lie."""
    assert output.isfinite().all()
    difference = (output.double() - expected).flatten(1).norm(dim=1)
    exact = expected.flatten(1).norm(dim=1)
    assert (difference.norm() / exact.norm()).item() < tolerance
    assert (difference <= 3 * tolerance * exact + 1e-9).all()
    assert not triton_prefill._failures
    output.fill_(float("nan"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS)
def test_encoders(options: str, dtype: torch.dtype) -> None:
    batch = random_batch(LENGTHS, LENGTHS, dtype=dtype, **SIZES)
    spec = AttentionSpec(8, 128, 128**-0.5, 2, attn_type=AttentionType.ENCODER_ONLY, **OPTIONS[options])
    rows = batch.metadata.encoder_rows(False)
    output = TritonImpl(spec)._attend_both_ways(Prefill(batch.query, batch.key, batch.value, None, rows))
    wide = (batch.query.double(), batch.key.double(), batch.value.double())
    check(output, NativeImpl(spec)._attend_both_ways(Prefill(*wide, None, rows)), TOLERANCE[dtype])


@pytest.mark.parametrize("size", [64, 80, 256])
def test_encoders_of_other_head_sizes(size: int) -> None:
    batch = random_batch(LENGTHS, LENGTHS, dtype=torch.bfloat16, **{**SIZES, "head_size": size})
    spec = AttentionSpec(8, size, size**-0.5, 2, attn_type=AttentionType.ENCODER_ONLY)
    rows = batch.metadata.encoder_rows(False)
    output = TritonImpl(spec)._attend_both_ways(Prefill(batch.query, batch.key, batch.value, None, rows))
    wide = (batch.query.double(), batch.key.double(), batch.value.double())
    check(output, NativeImpl(spec)._attend_both_ways(Prefill(*wide, None, rows)), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("new", [(200, 1, 129, 3, 70, 0, 5, 40), (1,) * 8], ids=["prompts", "decode"])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("case", [*OPTIONS, "fp8", "empty encoder"])
def test_cross_attention(case: str, block: int, new: tuple[int, ...]) -> None:
    """Encoders shorter and longer than their queries, some of whole tiles of keys; slots after their ends hold NaN."""
    lengths = (*LENGTHS[:3], 0, *LENGTHS[4:]) if case == "empty encoder" else LENGTHS
    sizes = {**SIZES, "block_size": block, "cache_dtype": FP8_DTYPE if case == "fp8" else None}
    batch = random_batch(lengths, lengths, dtype=torch.bfloat16, **sizes)
    spec = AttentionSpec(8, 128, 128**-0.5, 2, attn_type=AttentionType.ENCODER_DECODER, **OPTIONS.get(case, {}))
    kv = batch.kv(0.5, 0.25) if case == "fp8" else batch.kv()
    if case == "fp8":
        spec = replace(spec, kv_cache_dtype="fp8")
    TritonOps.write(batch.key, batch.value, kv, batch.metadata.slot_mapping)
    query = torch.randn(sum(new), 8, 128, device="cuda", dtype=torch.bfloat16)
    meta = AttentionMetadataBuilder().build(
        new, new, [[0]] * 8, [-1] * sum(new), "cuda", encoder_seq_lens=lengths, cross_block_tables=batch.block_tables
    )
    for _ in range(2):  # the first call may run other kernels, too
        output = TritonImpl(spec)._attend_cross(query, kv, meta.cross_rows())
        check(output, NativeImpl(spec)._attend_cross(query.double(), kv, meta.cross_rows()), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("pattern", [(1, 4, 64, 1), (2, 8, 32, -1), (1, 2, 48, 0, 1)])
def test_block_sparse_prompts(pattern: tuple[int, ...]) -> None:
    batch = random_batch((100, 3, 300), (1000, 90, 300), dtype=torch.bfloat16, **SIZES)
    spec = AttentionSpec(8, 128, 128**-0.5, 2, blocksparse=BlockSparse(*pattern))
    rows, wide = batch.metadata.all_rows(), (batch.query.double(), batch.key.double(), batch.value.double())
    output = TritonOps.prefill(batch.prefill(), spec)
    check(output, NativeOps.prefill(Prefill(*wide, batch.kv(), rows), spec), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("pattern", [(1, 4, 64, 1), (2, 8, 32, -1), (1, 2, 48, 0, 1)])
def test_block_sparse_decode(pattern: tuple[int, ...]) -> None:
    lengths = (1, 64, 65, 1000, 5000)
    batch = random_batch((1,) * 5, lengths, dtype=torch.bfloat16, **SIZES)
    spec = AttentionSpec(8, 128, 128**-0.5, 2, blocksparse=BlockSparse(*pattern))
    TritonOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    for _ in range(2):
        output = TritonOps.decode(batch.query, batch.kv(), batch.metadata.all_rows(), spec)
        expected = NativeOps.decode(batch.query.double(), batch.kv(), batch.metadata.all_rows(), spec)
        check(output, expected, TOLERANCE[torch.bfloat16])
