"""The native backend against the float64 reference: ragged and empty batches, every option, NaN in unused slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.metadata import AttentionMetadataBuilder
from tandem.kernels.api.spec import AttentionSpec, AttentionType, BlockSparse
from tandem.kernels.backends import native
from tandem.kernels.backends.gather import gather_blocks, similar_lengths
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.blocks.quantization import FP8_DTYPE, overflow_counts
from tandem.kernels.check.sample_batches import random_batch
from tandem.kernels.reference import paged

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "window-1": {"sliding_window": 1},
    "soft-cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(4))},
    "chunks": {"attention_chunk": 6},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    "sinks-in-chunks": {"attention_chunk": 11, "sinks": torch.tensor([9.0, -1.0, 0.0, 1.0]), "logits_soft_cap": 2.0},
    "all": {"sliding_window": 20, "logits_soft_cap": 2.0, "alibi_slopes": torch.tensor(paged.alibi_slopes(4))},
}
BATCHES = {
    "decode": ((1, 1, 1, 1), (33, 1, 16, 17)),
    "prompts": ((5, 17, 1), (5, 17, 1)),
    "chunks-with-prefix": ((3, 16, 2), (40, 33, 3)),
    "mixed": ((1, 1, 9, 1, 20), (30, 2, 25, 18, 20)),
    "one": ((1,), (1,)),
}


def layer_for(spec: AttentionSpec, **more: Any) -> Attention:
    return Attention(
        spec.num_heads, spec.head_size, spec.scale, spec.num_kv_heads, spec.alibi_slopes, spec.sliding_window,
        spec.logits_soft_cap, spec.kv_cache_dtype, attn_backend="native", attention_chunk=spec.attention_chunk,
        sinks=spec.sinks, hides_first=spec.hides_first, **more,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", BATCHES)
def test_matches_the_reference(lengths: str, options: str) -> None:
    batch = random_batch(*BATCHES[lengths], dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options])
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output, batch.expected(spec), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [((1, 1, 1), (33, 2, 17)), ((3, 16, 2), (40, 33, 3))], ids=["decode", "chunks"])
def test_the_first_token_hidden(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Of queries behind it: at position 0 there is nothing to see."""
    batch, spec = random_batch(*lengths, dtype=torch.float64), AttentionSpec(4, 16, 0.3, 2, hides_first=True)
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output, batch.expected(spec), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(6, 1, 80, 8), (3, 3, 24, 5), (8, 2, 32, 64)])
def test_other_shapes_and_dtypes(dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "block_size": block}
    batch = random_batch((1, 1, 7), (19, 4, 30), dtype=dtype, **sizes)
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads)
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), batch.expected(spec), rtol=tolerance, atol=tolerance)


def test_empty_batches_and_rows() -> None:
    spec = AttentionSpec(4, 16, 0.3, 2)
    empty = random_batch((0,), (16,))
    output = layer_for(spec)(empty.query, empty.key, empty.value, empty.kv_layer, empty.metadata)
    assert output.shape == (0, 4, 16)
    batch = random_batch((1, 1), (20, 1))
    rows = replace(batch.metadata.decode_rows(), seq_lens_cpu=(20, 0), seq_lens=torch.tensor([20, 0]), scratch={})
    NativeOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    output = NativeOps.decode(batch.query, batch.kv(), rows, spec)
    assert torch.equal(output[1], torch.zeros(4, 16))
    assert output[0].isfinite().all()


def test_a_prompt_without_a_cache_attends_to_itself_only() -> None:
    batch = random_batch((5, 17), (5, 17), dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2)
    output = layer_for(spec)(batch.query, batch.key, batch.value, torch.empty(0), batch.metadata)
    torch.testing.assert_close(output, batch.expected(spec), rtol=1e-9, atol=1e-9)


def test_negative_slots_are_not_written() -> None:
    batch = random_batch((4,), (4,))
    slots = batch.metadata.slot_mapping.clone()
    slots[2] = -1
    NativeOps.write(batch.key, batch.value, batch.kv(), slots)
    written = batch.kv_layer.isfinite().all(-1).all(1).all(1).sum()
    assert written == 3
    assert torch.equal(batch.pool[:, :, 0].isnan(), torch.ones_like(batch.pool[:, :, 0], dtype=torch.bool))


@pytest.mark.parametrize("lengths", ["decode", "mixed"])
def test_fp8_cache_dequantizes_with_its_scales(lengths: str) -> None:
    batch = random_batch(*BATCHES[lengths], cache_dtype=FP8_DTYPE)
    spec = AttentionSpec(4, 16, 0.3, 2, kv_cache_dtype="fp8")
    layer = layer_for(spec)
    output = layer(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata, 0.5, 0.25)
    torch.testing.assert_close(output.double(), batch.expected(spec, 0.5, 0.25), rtol=2e-6, atol=2e-6)


def test_fp8_stores_saturate_and_count() -> None:
    cache = torch.zeros(2, 1, 2, 4, 4, dtype=FP8_DTYPE)
    key = torch.tensor([[[500.0, -1e9, 448.0, float("inf")]]])
    before = overflow_counts().get("cpu", 0)
    NativeOps.write(key, torch.ones_like(key), PagedKV.of_layer(cache), torch.tensor([5]))
    assert cache[1, 0, 0, 1].float().tolist() == [448.0, -448.0, 448.0, 448.0]
    assert overflow_counts()["cpu"] - before == 3


@pytest.mark.parametrize("step", [0, 1, -1])
@pytest.mark.parametrize("rank", [0, 1])
def test_block_sparse_decode_and_prefill(step: int, rank: int) -> None:
    sparse = BlockSparse(local_blocks=1, vert_stride=3, block_size=4, head_sliding_step=step, tp_rank=rank)
    spec = AttentionSpec(4, 16, 0.3, 2, blocksparse=sparse)
    batch = random_batch((1, 1), (50, 13), dtype=torch.float64)
    NativeOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    output = NativeOps.decode(batch.query, batch.kv(), batch.metadata.decode_rows(), spec)
    pattern = {"local_blocks": 1, "vert_stride": 3, "block_size": 4, "head_sliding_step": step, "tp_rank": rank}
    caches = batch.kv().key_cache, batch.kv().value_cache
    expected = paged.paged_decode(batch.query, *caches, batch.block_tables, [50, 13], 0.3, sparse=pattern)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    dense = paged.paged_decode(batch.query, *caches, batch.block_tables, [50, 13], 0.3)
    assert not torch.allclose(output, dense)
    prompt = random_batch((30,), (30,), dtype=torch.float64, seed=1)
    rows = prompt.metadata.prefill_rows()
    chunked = NativeOps.prefill(Prefill(prompt.query, prompt.key, prompt.value, None, rows), spec)
    NativeOps.write(prompt.key, prompt.value, prompt.kv(), prompt.metadata.slot_mapping)
    caches = prompt.kv().key_cache, prompt.kv().value_cache
    last = paged.paged_decode(prompt.query[-1:], *caches, prompt.block_tables, [30], 0.3, sparse=pattern)
    torch.testing.assert_close(chunked[-1:], last, rtol=1e-9, atol=1e-9)


def test_query_chunks_of_long_prefills_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch((40,), (53,), dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2, sliding_window=11)
    whole = NativeOps.prefill(batch.prefill(), spec)
    monkeypatch.setattr(native, "QUERY_CHUNK", 7)
    torch.testing.assert_close(NativeOps.prefill(batch.prefill(), spec), whole)


def test_decode_rows_of_very_different_lengths_are_grouped() -> None:
    lengths = (600, 3, 310, 40, 299)
    assert similar_lengths(lengths) == [[0, 2], [4], [3, 1]]
    assert similar_lengths((5, 9, 2)) == [[0, 1, 2]]
    batch = random_batch((1,) * 5, lengths, dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2)
    output = layer_for(spec)(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output, batch.expected(spec), rtol=1e-9, atol=1e-9)


def test_encoder_attention_looks_both_ways() -> None:
    batch = random_batch((5, 9), (5, 9), dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2, attn_type=AttentionType.ENCODER_ONLY)
    layer = layer_for(spec, attn_type=AttentionType.ENCODER_ONLY)
    output = layer(
        batch.query, batch.key, batch.value, torch.empty(0), batch.metadata, attn_type=AttentionType.ENCODER_ONLY
    )
    for token, (first, last) in {0: (0, 5), 4: (0, 5), 5: (5, 14), 13: (5, 14)}.items():
        for head in range(4):
            keys, values = batch.key[first:last, head // 2], batch.value[first:last, head // 2]
            exact = paged.attend_token(batch.query[token, head], keys, values, 0, 0.3, causal=False)
            torch.testing.assert_close(output[token, head], exact, rtol=1e-9, atol=1e-9)


def test_cross_attention_reads_an_encoder_cache_that_is_written_once() -> None:
    encoder = random_batch((5, 18), (5, 18), dtype=torch.float64)
    spec = AttentionSpec(4, 16, 0.3, 2, attn_type=AttentionType.ENCODER_DECODER)
    layer = layer_for(spec, attn_type=AttentionType.ENCODER_DECODER)
    query = torch.randn(4, 4, 16, dtype=torch.float64)
    outputs = []
    for slots in (encoder.metadata.slot_mapping, None):  # the second step brings no encoder tokens
        metadata = AttentionMetadataBuilder().build(
            (1, 3), (7, 3), [[0], [0]], [-1] * 4, encoder_seq_lens=(5, 18),
            cross_block_tables=encoder.block_tables, cross_slot_mapping=slots,
        )  # fmt: skip
        outputs.append(
            layer(
                query, encoder.key, encoder.value, encoder.kv_layer, metadata, attn_type=AttentionType.ENCODER_DECODER
            )
        )
    assert torch.equal(*outputs)
    for token, (first, last) in {0: (0, 5), 1: (5, 23), 3: (5, 23)}.items():
        keys, values = encoder.key[first:last, 1], encoder.value[first:last, 1]
        exact = paged.attend_token(query[token, 3], keys, values, 0, 0.3, causal=False)
        torch.testing.assert_close(outputs[0][token, 3], exact, rtol=1e-9, atol=1e-9)


def test_gathering_does_not_depend_on_the_pool_s_strides() -> None:
    """The quick path needs blocks at multiples of a head's run; a padded block stride takes the general one."""
    batch = random_batch((1, 1), (40, 20))
    compact = batch.kv().key_cache
    wide = torch.empty(compact.shape[0], compact[0].numel() + 5)
    padded = wide[:, : compact[0].numel()].view(compact.shape)
    padded.copy_(compact)
    assert padded.stride(0) % (16 * 16)
    ids = torch.tensor([[3, 1], [0, 3]])
    expected = torch.stack([torch.cat([compact[b] for b in row], dim=1) for row in ids.tolist()])
    for cache in (compact, padded):
        gathered = gather_blocks(cache, 1.0, ids, torch.float32)
        assert torch.equal(gathered.nan_to_num(7.0), expected.nan_to_num(7.0))
