"""Encoders' and cross attention and block-sparse prompts under Triton's interpreter, against native float64.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import Prefill
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder
from tandem.kernels.api.spec import AttentionSpec, AttentionType, BlockSparse
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference import paged

HEADS = {"num_heads": 2, "num_kv_heads": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "wide window, soft cap": {"sliding_window": 70, "logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(2))},
    "sparse": {"blocksparse": BlockSparse(1, 3, 16, 1)},
}


def attend(
    batch: PagedBatch,
    query: torch.Tensor,
    meta: AttentionMetadata,
    spec: AttentionSpec,
    backend: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    layer = Attention(2, 16, 0.3, 1, attn_type=spec.attn_type, attn_backend=backend)
    layer.spec = spec
    keys = (batch.key.to(dtype), batch.value.to(dtype))
    meta = replace(meta, scratch={})
    return layer(query.to(dtype), *keys, batch.kv_layer, meta, 0.5, 0.25, attn_type=spec.attn_type)


@pytest.mark.parametrize("options", OPTIONS)
def test_encoders_look_both_ways(options: str) -> None:
    batch = random_batch((5, 130, 1), (5, 130, 1), **HEADS)
    spec = AttentionSpec(2, 16, 0.3, 1, attn_type=AttentionType.ENCODER_ONLY, **OPTIONS[options])
    output, expected = (
        attend(batch, batch.query, batch.metadata, spec, *how)
        for how in (("triton", torch.float32), ("native", torch.float64))
    )
    torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("new", "options", "cache_dtype"),
    [
        ((1, 3, 130, 0), "wide window, soft cap", torch.float32),
        ((1, 3, 20, 0), "alibi", FP8_DTYPE),
        ((2, 1, 1, 1), "sparse", torch.float32),
        ((1, 1, 1, 1), "window", torch.float32),
        ((1, 1, 1, 1), "plain", FP8_DTYPE),
    ],
)
def test_cross_attention_sees_the_encoder_alone(new: tuple[int, ...], options: str, cache_dtype: torch.dtype) -> None:
    """Encoders shorter and longer than their queries, one without tokens; the step that stores them and the next."""
    lengths = (5, 70, 18, 0)
    batch = random_batch(lengths, lengths, cache_dtype=cache_dtype, **HEADS)
    spec = AttentionSpec(2, 16, 0.3, 1, attn_type=AttentionType.ENCODER_DECODER, **OPTIONS[options])
    if cache_dtype == FP8_DTYPE:
        spec = replace(spec, kv_cache_dtype="fp8")
    query = torch.randn(sum(new), 2, 16)
    outputs = []
    for slots, backend, dtype in (
        (batch.metadata.slot_mapping, "triton", torch.float32), (None, "triton", torch.float32),
        (None, "native", torch.float64),
    ):  # fmt: skip
        meta = AttentionMetadataBuilder().build(
            new, new, [[0]] * 4, [-1] * sum(new), encoder_seq_lens=lengths, cross_block_tables=batch.block_tables,
            cross_slot_mapping=slots,
        )  # fmt: skip
        outputs.append(attend(batch, query, meta, spec, backend, dtype))
    assert torch.equal(*outputs[:2])
    torch.testing.assert_close(outputs[0].double(), outputs[2], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("pattern", [(1, 3, 16, 1), (1, 2, 48, -1, 1)])
def test_block_sparse_prompts(pattern: tuple[int, ...]) -> None:
    batch = random_batch((100, 3), (140, 90), **HEADS)
    spec = AttentionSpec(2, 16, 0.3, 1, blocksparse=BlockSparse(*pattern))
    rows, wide = batch.metadata.all_rows(), (batch.query.double(), batch.key.double(), batch.value.double())
    output = TritonOps.prefill(batch.prefill(), spec)
    expected = NativeOps.prefill(Prefill(*wide, batch.kv(), rows), spec)
    torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)
    dense = NativeOps.prefill(Prefill(*wide, batch.kv(), rows), replace(spec, blocksparse=None))
    assert not torch.allclose(expected, dense, rtol=1e-3)
