"""Stores new keys and values in the paged cache. T tokens, K KV heads, D head size, S slots a block."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import check_cache, check_tokens, padded_head_size

FP8_LARGEST: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def saturate(values, scale, overflow):
    """fp8 e4m3 of values / scale, clamped (NaN stays NaN); adds the number of clamped values to `overflow`."""
    scaled = values.to(tl.float32) / scale
    count = tl.sum((tl.abs(scaled) > FP8_LARGEST).to(tl.int32), 0)
    tl.atomic_add(overflow, count.to(tl.int64), mask=count > 0)
    scaled = tl.where(scaled > FP8_LARGEST, FP8_LARGEST, scaled)
    return tl.where(scaled < -FP8_LARGEST, -FP8_LARGEST, scaled).to(tl.float8e4nv)


@triton.jit
def cache_write_kernel(
    key,  # [T, K, D], strides (key_token, key_head, 1)
    value,  # [T, K, D], strides (value_token, value_head, 1)
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    slot_mapping,  # int64 [T]; -1: not stored
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    overflow,  # int64 [1]
    key_token,
    key_head,
    value_token,
    value_head,
    cache_block,
    cache_head,
    cache_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    D_PAD: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Grid (T, K): one head of one token, key and value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    columns = tl.arange(0, D_PAD)
    mask = columns < HEAD_SIZE
    new_key = tl.load(key + token * key_token + head * key_head + columns, mask=mask, other=0.0)
    new_value = tl.load(value + token * value_token + head * value_head + columns, mask=mask, other=0.0)
    if IS_FP8:
        new_key = saturate(new_key, tl.load(k_scale), overflow)
        new_value = saturate(new_value, tl.load(v_scale), overflow)
    target = (slot // BLOCK_SIZE) * cache_block + head * cache_head + (slot % BLOCK_SIZE) * cache_slot + columns
    tl.store(key_cache + target, new_key.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + target, new_value.to(value_cache.dtype.element_ty), mask=mask)


def cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    overflow: torch.Tensor,
) -> None:
    """key/value [T, K, D] to slots int64 [T]. An fp8 cache divides by the fp32 [1] scales, saturates and counts into
    `overflow` int64 [1]. Raises ValueError for shapes or strides that don't fit."""
    num_tokens, num_kv_heads, head_size = key.shape
    check_tokens("key", key, num_kv_heads, head_size)
    check_tokens("value", value, num_kv_heads, head_size)
    check_cache(key_cache, value_cache, num_kv_heads, head_size)
    if slot_mapping.shape != (num_tokens,) or value.shape[0] != num_tokens:
        raise ValueError(f"{num_tokens} keys, {value.shape[0]} values, slot_mapping {tuple(slot_mapping.shape)}")
    if num_tokens == 0:
        return
    cache_write_kernel[(num_tokens, num_kv_heads)](
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, overflow,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[2], HEAD_SIZE=head_size, D_PAD=padded_head_size(head_size),
        IS_FP8=key_cache.element_size() == 1, num_warps=1,
    )  # fmt: skip
