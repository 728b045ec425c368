"""Rotation of queries and keys, and the store of keys and values, in one launch. T tokens, C = (H + 2K) * D, P
positions. It depends on the number of tokens by its grid alone, so a captured launch serves any step of its size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.triton_kernels.adapters.rows import arguments_of, rows_of_b, sum_of, times
from tandem.kernels.triton_kernels.common import begin, cdiv, next_power_of_2, overlap, start, wait

FP8_LARGEST: tl.constexpr = tl.constexpr(448.0)
# Words of B for each column of a program's heads, half as many of keys and values: 64 registers of 128 threads.
WORDS_OF_HEADS = 64


@triton.jit
def _normed(
    first, second, weight, columns, mask, eps, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr
):
    """RMS norm over whole heads that lie in two halves [heads, HALF_PAD], fp32."""
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(square / HEAD_SIZE + eps)[:, None]
    low = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + HALF + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
    first = ((first * scale).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _to_cache(values, scale, overflow, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """The value as the cache stores it; fp8 saturates and counts (NaN stays NaN)."""
    if IS_FP8:
        scaled = values.to(tl.float32) / tl.load(scale)
        count = tl.sum(tl.sum((tl.abs(scaled) > FP8_LARGEST).to(tl.int32), 1), 0)
        tl.atomic_add(overflow, count.to(tl.int64), mask=count > 0)
        scaled = tl.where(scaled > FP8_LARGEST, FP8_LARGEST, scaled)
        return tl.where(scaled < -FP8_LARGEST, -FP8_LARGEST, scaled).to(tl.float8e4nv)
    else:
        return values.to(dtype)


@triton.jit
def _rows_of_heads(
    b, ranks, slot, part, outputs, mask, B_SLOT: tl.constexpr, RANK_SLOT: tl.constexpr, RANK: tl.constexpr
):
    """(B of these outputs [heads, columns] of a part [1, heads * columns, RANK], its rank [1])."""
    size: tl.constexpr = outputs.shape[0] * outputs.shape[1]
    rank = tl.load(ranks + (slot - 1) * RANK_SLOT + part, slot > 0, 0)
    return rows_of_b(b, slot, rank, outputs.reshape(size), mask.reshape(size), B_SLOT, RANK), rank


@triton.jit
def _plus(
    values, matrix, low, place, part, rank, dtype: tl.constexpr,
    RANK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """values [heads, columns] plus low B^T, rounded as a product's output is."""
    row = sum_of(low, place, part, rank, tl.num_programs(0), 3 * RANK, RANK, SPLITS, SPLITS_PAD, RANK)
    added = times(matrix, row).reshape(values.shape[0], values.shape[1])
    return (values.to(tl.float32) + added).to(dtype)


@triton.jit
def rope_and_store_kernel(
    qkv,  # [T, C], strides (qkv_row, 1): query heads, key heads, value heads; queries and keys are rotated in place
    positions,  # int64 [T]
    cos_sin,  # fp32 [P, D] contiguous: cos of the D / 2 angles, then sin
    q_weight,  # [D]
    k_weight,  # [D]
    key_cache,  # [num_blocks, K, S, D], strides (cache_block, cache_head, cache_slot, 1)
    value_cache,  # as key_cache
    slot_mapping,  # int64 [T]; -1: not stored
    k_scale,  # fp32 [1]
    v_scale,  # fp32 [1]
    overflow,  # int64 [1]
    low,  # with RANK, like the four behind it: as in expand_rows_kernel, of three parts
    b,
    ranks,
    order,
    slots,
    qkv_row,
    cache_block,
    cache_head,
    cache_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a program, a power of two
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    IS_FP8: tl.constexpr,
    RANK: tl.constexpr,  # 0: no adapters
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    B_SLOT: tl.constexpr,
    RANK_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, programs of queries, then of keys and values of a token): with adapters, of qkv + low B^T. Positions and
    slots are read before the wait: a pass begins with an embedding, behind which they are complete."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    columns, wide = tl.arange(0, HALF_PAD), tl.arange(0, D_PAD)
    in_half = columns < HALF
    if RANK:
        start(PDL)
        token = tl.load(order + tl.program_id(0)).to(tl.int64)
        place = tl.program_id(0) + tl.arange(0, 1)
        slot = tl.load(slots + place).to(tl.int64)
    else:
        start(PDL)
        token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token, cache_modifier=".cg")
    cos = tl.load(cos_sin + position * HEAD_SIZE + columns, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_SIZE + HALF + columns, mask=in_half, other=0.0)[None, :]
    if HAS_CACHE:
        cache_at = tl.load(slot_mapping + token, cache_modifier=".cg")
    if not RANK:
        wait(PDL)
    q_programs: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if tl.program_id(1) < q_programs:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        outputs = heads[:, None] * HEAD_SIZE + columns[None, :]
        if RANK:
            of_first, rank = _rows_of_heads(b, ranks, slot, 0, outputs, mask, B_SLOT, RANK_SLOT, RANK)
            of_second, rank = _rows_of_heads(b, ranks, slot, 0, outputs + HALF, mask, B_SLOT, RANK_SLOT, RANK)
            wait(PDL)
        at = qkv + token * qkv_row + outputs
        first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)
        if RANK:
            first = _plus(first, of_first, low, place, 0, rank, dtype, RANK, SPLITS, SPLITS_PAD)
            second = _plus(second, of_second, low, place, 0, rank, dtype, RANK, SPLITS, SPLITS_PAD)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            first, second = _normed(first, second, q_weight, columns, in_half, eps, HEAD_SIZE, HALF, dtype)
        tl.store(at, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(at + HALF, (second * cos + first * sin).to(dtype), mask=mask)
    else:
        kv_heads = (tl.program_id(1) - q_programs) * KV_HEADS + tl.arange(0, KV_HEADS)
        kv_mask = (kv_heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
        whole = (kv_heads < NUM_KV_HEADS)[:, None] & (wide < HEAD_SIZE)[None, :]
        keys = (NUM_HEADS + kv_heads)[:, None] * HEAD_SIZE + columns[None, :]
        values = (NUM_HEADS + NUM_KV_HEADS + kv_heads)[:, None] * HEAD_SIZE + wide[None, :]
        if RANK:
            of_low, rank = _rows_of_heads(b, ranks, slot, 1, keys, kv_mask, B_SLOT, RANK_SLOT, RANK)
            of_high, rank = _rows_of_heads(b, ranks, slot, 1, keys + HALF, kv_mask, B_SLOT, RANK_SLOT, RANK)
            of_value, v_rank = _rows_of_heads(b, ranks, slot, 2, values, whole, B_SLOT, RANK_SLOT, RANK)
            wait(PDL)
        row = qkv + token * qkv_row
        k_low = tl.load(row + keys, mask=kv_mask, other=0.0)
        k_high = tl.load(row + keys + HALF, mask=kv_mask, other=0.0)
        if RANK:
            k_low = _plus(k_low, of_low, low, place, 1, rank, dtype, RANK, SPLITS, SPLITS_PAD)
            k_high = _plus(k_high, of_high, low, place, 1, rank, dtype, RANK, SPLITS, SPLITS_PAD)
        k_low, k_high = k_low.to(tl.float32), k_high.to(tl.float32)
        if HAS_NORM:
            k_low, k_high = _normed(k_low, k_high, k_weight, columns, in_half, eps, HEAD_SIZE, HALF, dtype)
        rotated, other = (k_low * cos - k_high * sin).to(dtype), (k_high * cos + k_low * sin).to(dtype)
        tl.store(row + keys, rotated, mask=kv_mask)
        tl.store(row + keys + HALF, other, mask=kv_mask)
        if HAS_CACHE or RANK:
            value = tl.load(row + values, mask=whole, other=0.0)
        if RANK:
            value = _plus(value, of_value, low, place, 2, v_rank, dtype, RANK, SPLITS, SPLITS_PAD)
            tl.store(row + values, value, mask=whole)
        if HAS_CACHE:  # noqa: SIM102 (it is decided when the kernel is compiled)
            if cache_at >= 0:
                cached: tl.constexpr = key_cache.dtype.element_ty
                offsets = kv_heads.to(tl.int64)[:, None] * cache_head
                offsets += (cache_at // BLOCK_SIZE) * cache_block + (cache_at % BLOCK_SIZE) * cache_slot
                key_at = key_cache + offsets + columns[None, :]
                tl.store(key_at, _to_cache(rotated, k_scale, overflow, IS_FP8, cached), mask=kv_mask)
                tl.store(key_at + HALF, _to_cache(other, k_scale, overflow, IS_FP8, cached), mask=kv_mask)
                stored = _to_cache(value, v_scale, overflow, IS_FP8, cached)
                tl.store(value_cache + offsets + wide[None, :], stored, mask=whole)


def rope_and_store_triton(
    qkv_TC: torch.Tensor,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    adapted: UnaddedProduct | None = None,
) -> None:
    """`norms`: weights of q and k, epsilon. `caches`: key, value [num_blocks, K, S, D], slot_mapping int64 [T].
    `scales`: k, v fp32 [1], overflow counter int64 [1]; for fp8 caches. `adapted`: the product
    of which `qkv_TC` is, if adapters are to be added to it."""
    num_tokens, head_size = qkv_TC.shape[0], cos_sin_PD.shape[1]
    if not num_tokens:
        return
    q_weight, k_weight, eps = norms or (qkv_TC, qkv_TC, 0.0)
    key_cache, value_cache, slots = caches or (qkv_TC, qkv_TC, position_T)
    strides, block_size = (key_cache.stride()[:3], key_cache.shape[2]) if caches else ((0, 0, 0), 1)
    k_scale, v_scale, overflow = scales or (cos_sin_PD, cos_sin_PD, position_T)
    most = 1 << 30 if adapted is None else max(1, WORDS_OF_HEADS // adapted.stack.rank)
    heads, kv_heads = min(most, _padded(num_heads)), min(max(1, most // 2), _padded(num_kv_heads))
    tensors, constants = arguments_of(adapted)
    programs = cdiv(num_heads, heads) + cdiv(num_kv_heads, kv_heads)
    rope_and_store_kernel[(num_tokens, programs)](
        qkv_TC, position_T, cos_sin_PD, q_weight, k_weight, key_cache, value_cache, slots, k_scale, v_scale, overflow,
        *tensors, qkv_TC.stride(0), *strides, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEADS=heads, KV_HEADS=kv_heads,
        HEAD_SIZE=head_size, HALF=head_size // 2, HALF_PAD=_padded(head_size // 2), D_PAD=_padded(head_size),
        BLOCK_SIZE=block_size, HAS_NORM=norms is not None, HAS_CACHE=caches is not None,
        IS_FP8=scales is not None, num_warps=4, **constants, **overlap(qkv_TC.device),
    )  # fmt: skip


def _padded(count: int) -> int:
    return next_power_of_2(max(count, 1))


@triton.jit
def _rotate_halves(
    source, target, stride, head, cos_a, sin_a, cos_b, sin_b, COUNT: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some of a token's COUNT heads, from `source` on, into `target`, where they are contiguous."""
    columns, heads = tl.arange(0, HALF_PAD), head + tl.arange(0, HEADS)
    mask = (heads < COUNT)[:, None] & (columns < HALF)[None, :]
    at = source + heads[:, None] * stride + columns[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    into = target + heads[:, None] * (2 * HALF) + columns[None, :]
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(into, (first * cos_a[None, :] - second * sin_a[None, :]).to(dtype), mask=mask)
    tl.store(into + HALF, (second * cos_b[None, :] + first * sin_b[None, :]).to(dtype), mask=mask)


@triton.jit(
    do_not_specialize=[
        "q_head", "q_token", "k_head", "k_token", "cos_token", "cos_column", "sin_token", "sin_column"
    ]
)  # fmt: skip
def rotate_halves_kernel(
    query,  # [T, NUM_HEADS, 2 * HALF], strides (q_token, q_head, 1)
    key,  # [T, NUM_KV_HEADS, 2 * HALF], strides (k_token, k_head, 1)
    query_out,  # as query, contiguous
    key_out,  # as key, contiguous
    cos,  # [T, HALF] or, WIDE, [T, 2 * HALF]: of each half its own; strides (cos_token, cos_column)
    sin,  # as cos, strides (sin_token, sin_column)
    q_head,
    q_token,
    k_head,
    k_token,
    cos_token,
    cos_column,
    sin_token,
    sin_column,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    """Grid (T, ceil(NUM_HEADS / HEADS) + ceil(NUM_KV_HEADS / HEADS)). Rotated in fp32, rounded once."""
    begin(PDL)
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, HALF_PAD)
    within = columns < HALF
    cosines, sines = cos + token * cos_token + columns * cos_column, sin + token * sin_token + columns * sin_column
    cos_a = tl.load(cosines, mask=within, other=0.0).to(tl.float32)
    sin_a = tl.load(sines, mask=within, other=0.0).to(tl.float32)
    if WIDE:
        cos_b = tl.load(cosines + HALF * cos_column, mask=within, other=0.0).to(tl.float32)
        sin_b = tl.load(sines + HALF * sin_column, mask=within, other=0.0).to(tl.float32)
    else:
        cos_b, sin_b = cos_a, sin_a
    of_query: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if place < of_query:
        _rotate_halves(
            query + token * q_token, query_out + token * (NUM_HEADS * 2 * HALF), q_head, place * HEADS,
            cos_a, sin_a, cos_b, sin_b, NUM_HEADS, HALF, HALF_PAD, HEADS,
        )  # fmt: skip
    else:
        _rotate_halves(
            key + token * k_token, key_out + token * (NUM_KV_HEADS * 2 * HALF), k_head, (place - of_query) * HEADS,
            cos_a, sin_a, cos_b, sin_b, NUM_KV_HEADS, HALF, HALF_PAD, HEADS,
        )  # fmt: skip


def rotate_halves_triton(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton twin of `rotate_halves`."""
    num_tokens, num_heads, size = query_THD.shape
    num_kv_heads, half = key_TKD.shape[1], size // 2
    query, key = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query_THD, key_TKD))
    heads = min(16, next_power_of_2(num_heads))
    if num_tokens:
        rotate_halves_kernel[(num_tokens, cdiv(num_heads, heads) + cdiv(num_kv_heads, heads))](
            query_THD, key_TKD, query, key, cos_TC, sin_TC, query_THD.stride(1), query_THD.stride(0),
            key_TKD.stride(1), key_TKD.stride(0), *cos_TC.stride(), *sin_TC.stride(), NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads, HALF=half, HALF_PAD=next_power_of_2(half), WIDE=cos_TC.shape[1] == size,
            HEADS=heads, num_warps=4, **overlap(query_THD.device),
        )  # fmt: skip
    return query, key
