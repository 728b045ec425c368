"""Stand-ins for optional attention packages, which need a GPU: the signatures of their releases, computed plainly.

flash-attn 2.8.3 and the Hopper interface of FlashAttention 3, flashinfer-python 0.6.18, xformers 0.0.35. A parameter
that a release doesn't have fails as it would there; one that these twins don't compute must be given its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tandem.kernels.reference import paged


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window_left: int, soft_cap: float,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Queries are the last positions of the keys; `window_left` earlier keys are seen, -1: all."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).double() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    keys = torch.arange(len(key))
    queries = keys[len(key) - len(query) :, None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (keys - queries)
    hidden = keys > queries
    if window_left >= 0:
        hidden |= keys < queries - window_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value).to(query.dtype)


def _window(causal: bool, window_size: tuple[int, int]) -> int:
    assert causal
    left, right = window_size
    assert right == (0 if left >= 0 else -1)
    return left


class FlashAttention2:
    """Module `flash_attn`."""

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert block_table is None
        left = _window(causal, window_size)
        rows = []
        for (first, last), (key_first, key_last) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
            assert last - first <= max_seqlen_q
            assert key_last - key_first <= max_seqlen_k
            own = slice(key_first, key_last)
            rows.append(_attend(q[first:last], k[own], v[own], softmax_scale, left, softcap, alibi_slopes))
        return torch.cat(rows)


class FlashAttention3:
    """Module `flash_attn_interface`."""

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        return FlashAttention2.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
            softcap,
        )  # fmt: skip

    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert k is None
        left = _window(causal, window_size)
        rows = []
        for index, (first, last) in enumerate(pairwise(cu_seqlens_q)):
            assert last - first <= max_seqlen_q
            length = int(cache_seqlens[index])
            # [pages, slots, heads, size] -> the caches of reference.py, [pages, heads, slots, size]
            key, value = (
                paged.read_sequence(cache.transpose(1, 2), page_table[index].tolist(), length)
                for cache in (k_cache, v_cache)
            )
            rows.append(_attend(q[first:last], key, value, softmax_scale, left, softcap))
        return torch.cat(rows)


class FlashInfer:
    """Module `flashinfer`."""

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, **buffers):
            assert float_workspace_buffer.numel() >= 128 << 20
            assert kv_layout == "HND"

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
            pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
            logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
            o_data_type=None, non_blocking=True,
        ):  # fmt: skip
            for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
                assert tensor.dtype == torch.int32
            assert causal
            self.lists = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
            self.indices, self.page_size = paged_kv_indices.tolist(), page_size
            self.sizes = num_qo_heads, num_kv_heads, head_dim_qk
            self.options = sm_scale, window_left, logits_soft_cap or 0.0
            self.dtypes = q_data_type, kv_data_type

        def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None, return_lse=False):
            key_cache, value_cache = paged_kv_cache
            assert (q.dtype, key_cache.dtype) == self.dtypes
            assert (q.shape[1], key_cache.shape[1], q.shape[2]) == self.sizes
            starts, blocks, last = self.lists
            assert q.shape[0] == starts[-1]
            rows = []
            for row, ((first, end), (low, high)) in enumerate(zip(pairwise(starts), pairwise(blocks), strict=True)):
                length = (high - low - 1) * self.page_size + last[row]
                table = self.indices[low:high]
                key, value = (paged.read_sequence(cache, table, length) for cache in (key_cache, value_cache))
                rows.append(_attend(q[first:end], key, value, *self.options))
            return torch.cat(rows)


@dataclass
class BlockDiagonalCausalMask:
    """xformers.ops.fmha.attn_bias.BlockDiagonalCausalMask."""

    lengths: list[int]

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert kv_seqlen is None
        return cls(list(q_seqlen))


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """xformers.ops: [1, tokens, groups, heads of a group, size], keys and values expanded over the group."""
    assert query.shape == key.shape == value.shape
    assert query.shape[1] == sum(attn_bias.lengths)
    q, k, v = (x[0].flatten(1, 2) for x in (query, key, value))
    rows, first = [], 0
    for length in attn_bias.lengths:
        own = slice(first, first + length)
        rows.append(_attend(q[own], k[own], v[own], scale, -1, 0.0))
        first += length
    return torch.cat(rows).view(query.shape)
