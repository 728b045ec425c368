"""Small operations between matrix products, one launch each. T tokens, E hidden size, F MLP size, C = (H + 2K) * D.

None depends on the number of tokens but through its grid, so a captured launch serves any step of its size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, overlap
from tandem.kernels.triton_kernels.products.quantise_rows import in_e4m3

FP8_LARGEST: tl.constexpr = tl.constexpr(448.0)
MAX_SPLITS = 64  # a guess


@triton.jit
def rms_norm_kernel(
    x,  # [T, E], strides (x_row, 1)
    residual,  # [T, E], strides (residual_row, 1); becomes x + residual
    weight,  # [E]
    out,  # [T, E] contiguous; with ROUNDS e4m3
    scales,  # fp32 [T], with ROUNDS
    x_row,
    residual_row,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,): statistics in fp32 of the sum as it is stored."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    mask = columns < SIZE
    values = tl.load(x + row * x_row + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        values = values.to(tl.float32) + tl.load(residual + row * residual_row + columns, mask=mask, other=0.0)
        values = values.to(x.dtype.element_ty)
        tl.store(residual + row * residual_row + columns, values, mask=mask)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = (normed * tl.load(weight + columns, mask=mask, other=0.0)).to(x.dtype.element_ty)
    if ROUNDS:
        scaled, row_scale = in_e4m3(scaled.to(tl.float32))
        tl.store(scales + row, row_scale)
    tl.store(out + row * SIZE + columns, scaled, mask=mask)


def rms_norm_triton(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    scales_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """With `scales_T1`, fp32, what is returned is in e4m3, and these are its rows' scales."""
    num_tokens, size = x_TE.shape
    dtype = x_TE.dtype if scales_T1 is None else torch.float8_e4m3fn
    out = torch.empty((num_tokens, size), dtype=dtype, device=x_TE.device)
    residual = x_TE if residual_TE is None else residual_TE
    if num_tokens:
        rms_norm_kernel[(num_tokens,)](
            x_TE, residual, weight_E, out, scales_T1, x_TE.stride(0), residual.stride(0), eps, SIZE=size,
            PADDED=triton.next_power_of_2(size), HAS_RESIDUAL=residual_TE is not None, ROUNDS=scales_T1 is not None,
            num_warps=min(16, max(1, triton.next_power_of_2(size) // 512)), **overlap(x_TE.device),
        )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(
    gate_up,  # [T, 2F], strides (row, 1): gate, then up, or by turns GROUP columns of each
    out,  # [T, F] contiguous
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, ceil(F / BLOCK))."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    places = columns // GROUP * (2 * GROUP) + columns % GROUP
    gate = tl.load(gate_up + row * row_stride + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + places + GROUP, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up_TG: torch.Tensor, group: int = 0) -> torch.Tensor:
    """`group` 0: all of gate, then all of up."""
    num_tokens, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    if num_tokens:
        block = min(2048, triton.next_power_of_2(size))
        silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](
            gate_up_TG, out, gate_up_TG.stride(0), SIZE=size, BLOCK=block, GROUP=group or size,
            num_warps=max(1, min(8, block // 256)), **overlap(gate_up_TG.device),
        )  # fmt: skip
    return out


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
    qkv_row,
    cache_block,
    cache_head,
    cache_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    IS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, 2): program (t, 0) does the queries of token t, program (t, 1) its keys and values."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    columns = tl.arange(0, HALF_PAD)
    in_half = columns < HALF
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * HEAD_SIZE + columns, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_SIZE + HALF + columns, mask=in_half, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS_PAD)
        mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        place = qkv + token * qkv_row + heads[:, None] * HEAD_SIZE + columns[None, :]
        first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            first, second = _normed(first, second, q_weight, columns, in_half, eps, HEAD_SIZE, HALF, dtype)
        tl.store(place, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(place + HALF, (second * cos + first * sin).to(dtype), mask=mask)
    else:
        kv_heads = tl.arange(0, KV_HEADS_PAD)
        kv_mask = (kv_heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
        kv_place = qkv + token * qkv_row + (NUM_HEADS + kv_heads)[:, None] * HEAD_SIZE + columns[None, :]
        k_first = tl.load(kv_place, mask=kv_mask, other=0.0).to(tl.float32)
        k_second = tl.load(kv_place + HALF, mask=kv_mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            k_first, k_second = _normed(k_first, k_second, k_weight, columns, in_half, eps, HEAD_SIZE, HALF, dtype)
        low = (k_first * cos - k_second * sin).to(dtype)
        high = (k_second * cos + k_first * sin).to(dtype)
        tl.store(kv_place, low, mask=kv_mask)
        tl.store(kv_place + HALF, high, mask=kv_mask)
        if HAS_CACHE:
            slot = tl.load(slot_mapping + token)
            if slot >= 0:
                cached: tl.constexpr = key_cache.dtype.element_ty
                offsets = kv_heads.to(tl.int64)[:, None] * cache_head
                offsets += (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot
                at = key_cache + offsets + columns[None, :]
                tl.store(at, _to_cache(low, k_scale, overflow, IS_FP8, cached), mask=kv_mask)
                tl.store(at + HALF, _to_cache(high, k_scale, overflow, IS_FP8, cached), mask=kv_mask)
                wide = tl.arange(0, D_PAD)
                whole = (kv_heads < NUM_KV_HEADS)[:, None] & (wide < HEAD_SIZE)[None, :]
                source = (NUM_HEADS + NUM_KV_HEADS + kv_heads)[:, None] * HEAD_SIZE + wide[None, :]
                value = tl.load(qkv + token * qkv_row + source, mask=whole, other=0.0)
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
) -> None:
    """`norms`: weights of q and k, epsilon. `caches`: key, value [num_blocks, K, S, D], slot_mapping int64 [T].
    `scales`: k, v fp32 [1], overflow counter int64 [1]; for fp8 caches."""
    num_tokens, head_size = qkv_TC.shape[0], cos_sin_PD.shape[1]
    if not num_tokens:
        return
    q_weight, k_weight, eps = norms or (qkv_TC, qkv_TC, 0.0)
    key_cache, value_cache, slots = caches or (qkv_TC, qkv_TC, position_T)
    strides, block_size = (key_cache.stride()[:3], key_cache.shape[2]) if caches else ((0, 0, 0), 1)
    k_scale, v_scale, overflow = scales or (cos_sin_PD, cos_sin_PD, position_T)
    rope_and_store_kernel[(num_tokens, 2)](
        qkv_TC, position_T, cos_sin_PD, q_weight, k_weight, key_cache, value_cache, slots, k_scale, v_scale, overflow,
        qkv_TC.stride(0), *strides, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEADS_PAD=_padded(num_heads), KV_HEADS_PAD=_padded(num_kv_heads),
        HEAD_SIZE=head_size, HALF=head_size // 2, HALF_PAD=_padded(head_size // 2), D_PAD=_padded(head_size),
        BLOCK_SIZE=block_size, HAS_NORM=norms is not None, HAS_CACHE=caches is not None,
        IS_FP8=scales is not None, num_warps=4, **overlap(qkv_TC.device),
    )  # fmt: skip


def _padded(count: int) -> int:
    return triton.next_power_of_2(max(count, 1))


@triton.jit(do_not_specialize=["num_splits", "size"])
def argmax_parts_kernel(
    logits,  # [R, V], strides (row_stride, 1)
    peaks,  # fp32 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    row_stride,
    size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, num_splits): the largest logit of one part of a row, the first of equals."""
    begin(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.cdiv(size, BLOCK)
    per_split = tl.cdiv(num_blocks, num_splits)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + size
    for block in range(split * per_split, tl.minimum((split + 1) * per_split, num_blocks)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        better = (values > best) | ((values == best) & (columns < where))
        best = tl.where(better, values, best)
        where = tl.where(better, columns, where)
    peak = tl.max(best, 0)
    tl.store(peaks + row * MAX_SPLITS + split, peak)
    tl.store(places + row * MAX_SPLITS + split, tl.min(tl.where(best == peak, where, size), 0))


@triton.jit(do_not_specialize=["num_splits", "size"])
def argmax_whole_kernel(
    peaks,  # fp32 [R, MAX_SPLITS]
    places,  # int32 [R, MAX_SPLITS]
    tokens,  # int64 [R]
    size,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    mask = splits < num_splits
    values = tl.load(peaks + row * MAX_SPLITS + splits, mask=mask, other=float("-inf"))
    where = tl.load(places + row * MAX_SPLITS + splits, mask=mask, other=size)
    chosen = tl.min(tl.where(values == tl.max(values, 0), where, size), 0)
    tl.store(tokens + row, tl.minimum(chosen, size - 1).to(tl.int64))


def argmax_triton(logits_RV: torch.Tensor) -> torch.Tensor:
    num_rows, size = logits_RV.shape
    device = logits_RV.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    num_splits = max(1, min(MAX_SPLITS, 1024 // num_rows))
    peaks = torch.empty((num_rows, MAX_SPLITS), dtype=torch.float32, device=device)
    places = torch.empty((num_rows, MAX_SPLITS), dtype=torch.int32, device=device)
    argmax_parts_kernel[(num_rows, num_splits)](
        logits_RV, peaks, places, logits_RV.stride(0), size, num_splits, MAX_SPLITS=MAX_SPLITS, BLOCK=2048,
        num_warps=4, **overlap(device),
    )  # fmt: skip
    argmax_whole_kernel[(num_rows,)](
        peaks, places, tokens, size, num_splits, MAX_SPLITS=MAX_SPLITS, num_warps=2, **overlap(device)
    )
    return tokens
