"""Attention of decode steps of few rows from the merged QKV projection, in one launch on Hopper.

R rows of one new token, H query heads, K KV heads, D head size, C = (H + 2K) * D, P positions, B table columns,
N programs.
"""

from __future__ import annotations

import functools

import torch

from tandem.kernels.api.spec import AttentionSpec, AttentionType
from tandem.kernels.products.few_rows_scratch import MOST_ROWS, scratch_for
from tandem.kernels.products.fused_ops import CacheSlots, HeadNorms

MOST_GROUP = 16  # query heads of a KV head


def why_not(num_rows: int, dtype: torch.dtype, spec: AttentionSpec, cache: torch.Tensor) -> str | None:
    """Why this kernel doesn't serve such rows of a layer, or None. `cache` [num_blocks, K, 2, S, D]. Pure."""
    options = (
        spec.sliding_window, spec.logits_soft_cap, spec.alibi_slopes, spec.blocksparse, spec.attention_chunk, spec.sinks
    )  # fmt: skip
    reasons = (
        (not 0 < num_rows <= MOST_ROWS, f"{num_rows} rows"),
        (cache.numel() == 0 or cache.dtype != dtype, f"the cache holds {cache.dtype}, not {dtype}"),
        (dtype not in (torch.bfloat16, torch.float16), f"dtype {dtype}"),
        (spec.head_size not in (64, 128), f"head_size {spec.head_size}"),
        (spec.group_size > MOST_GROUP, f"{spec.group_size} query heads a KV head"),
        (spec.hides_first or any(option is not None for option in options), "an option of the layer"),
        (spec.attn_type != AttentionType.DECODER, f"attn_type {spec.attn_type}"),
        (cache.dim() != 5 or cache.shape[3] % 16 != 0, "the block size"),
    )
    return next((reason for fails, reason in reasons if fails), None)


@functools.cache
def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def few_rows_attention(
    qkv_RC: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    block_tables_RB: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots: CacheSlots,
    num_heads: int,
    scale: float,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """[R, H, D]: norms and rotates queries and keys (NeoX halves; the new token of row r is at seq_lens[r] - 1), stores
    keys and values, attends to the whole sequence. `qkv_RC` is only read; seq_lens int32, 0 for padding."""
    from tandem.kernels.triton_kernels.products.few_rows_launch import launch_attention

    num_rows, num_kv_heads = qkv_RC.shape[0], slots.key_cache.shape[1]
    head_size = cos_sin_PD.shape[1]
    scratch = scratch_for(num_rows * num_kv_heads, num_heads // num_kv_heads, head_size, qkv_RC.device)
    output = torch.empty((num_rows, num_heads, head_size), dtype=qkv_RC.dtype, device=qkv_RC.device)
    launch_attention(output, scratch, qkv_RC, cos_sin_PD, block_tables_RB, seq_lens_R, slots, scale, norms)
    return output
