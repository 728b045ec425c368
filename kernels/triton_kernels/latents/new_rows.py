"""Norm, rotation and store of new rows of latents, and rotation of queries, in place. T tokens, H heads, L latent size,
P rotated elements, S slots a block.

A thread stores elements where it loaded them, so that nothing waits for others within a program."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, cdiv, next_power_of_2, overlap


@triton.jit
def turned(pointers, mask, cos, sin, STEP: tl.constexpr, dtype: tl.constexpr):
    """The two halves of rotated elements: `pointers` of the first ones, STEP to their partners."""
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + STEP, mask=mask, other=0.0).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def finish_rows(
    rows,  # [M] of which `there` are
    there,
    latents,  # [T, L + P], strides (latent_row, 1)
    gain,
    positions,
    cos_sin,
    cache,  # [num_blocks, S, L + P], strides (cache_block, cache_slot, 1)
    slots,
    latent_row,
    cache_block,
    cache_slot,
    eps,
    LATENT: tl.constexpr,
    L_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Stores the rows in the cache, IN_PLACE where they came from, too."""
    dtype: tl.constexpr = latents.dtype.element_ty
    cached: tl.constexpr = cache.dtype.element_ty
    columns, pairs = tl.arange(0, L_PAD), tl.arange(0, HALF_PAD)
    mask = there[:, None] & (columns < LATENT)[None, :]
    source = latents + rows.to(tl.int64)[:, None] * latent_row
    values = tl.load(source + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / LATENT + eps)
    normed = (values * scale[:, None]).to(dtype).to(tl.float32)
    gains = tl.load(gain + columns, mask=columns < LATENT, other=0.0).to(tl.float32)
    normed = (normed * gains[None, :]).to(dtype)
    in_half = there[:, None] & (pairs < HALF)[None, :]
    angles = cos_sin + tl.load(positions + rows, mask=there, other=0)[:, None] * (2 * HALF) + pairs[None, :]
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    STEP: tl.constexpr = 1 if INTERLEAVED else HALF
    places = LATENT + pairs * (2 if INTERLEAVED else 1)
    first, second = turned(source + places[None, :], in_half, cos, sin, STEP, dtype)
    if IN_PLACE:
        tl.store(source + columns[None, :], normed, mask=mask)
        tl.store(source + places[None, :], first, mask=in_half)
        tl.store(source + places[None, :] + STEP, second, mask=in_half)
    slot = tl.load(slots + rows, mask=there, other=-1)
    target = cache + ((slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_slot)[:, None]
    has_slot = (slot >= 0)[:, None]
    tl.store(target + columns[None, :], normed.to(cached), mask=mask & has_slot)
    tl.store(target + places[None, :], first.to(cached), mask=in_half & has_slot)
    tl.store(target + places[None, :] + STEP, second.to(cached), mask=in_half & has_slot)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def store_and_rotate_kernel(
    query,  # [T, H, D], strides (query_row, query_head, 1): the last 2 * HALF elements of each head are rotated
    latents,  # [T, L + P], strides (latent_row, 1)
    gain,  # [L]
    positions,  # int64 [T]
    cos_sin,  # fp32 [C, 2 * HALF] contiguous: cos of a position's angles, then sin
    cache,  # [num_blocks, S, L + P], strides (cache_block, cache_slot, 1)
    slots,  # int64 [T]; -1: not stored
    query_row,
    query_head,
    latent_row,
    cache_block,
    cache_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    KEY: tl.constexpr,  # elements of a head before the rotated ones
    LATENT: tl.constexpr,
    L_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, 1 + ceil(H / HEADS)): program (t, 0) does the row of token t, the others its queries."""
    begin(PDL)
    token, part = tl.program_id(0), tl.program_id(1)
    if part == 0:
        rows = token + tl.arange(0, 1)
        finish_rows(
            rows, rows >= 0, latents, gain, positions, cos_sin, cache, slots, latent_row, cache_block, cache_slot, eps,
            LATENT, L_PAD, HALF, HALF_PAD, BLOCK_SIZE, INTERLEAVED, True,
        )  # fmt: skip
    else:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        pairs = tl.arange(0, HALF_PAD)
        mask = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
        angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pairs
        cos = tl.load(angles, mask=pairs < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)[None, :]
        STEP: tl.constexpr = 1 if INTERLEAVED else HALF
        places = query + token.to(tl.int64) * query_row + heads[:, None] * query_head
        places += KEY + pairs[None, :] * (2 if INTERLEAVED else 1)
        first, second = turned(places, mask, cos, sin, STEP, query.dtype.element_ty)
        tl.store(places, first, mask=mask)
        tl.store(places + STEP, second, mask=mask)


def store_and_rotate_triton(
    query_THD: torch.Tensor,
    row_TR: torch.Tensor,
    gain_L: torch.Tensor,
    eps: float,
    position_T: torch.Tensor,
    cos_sin_CP: torch.Tensor,
    cache: torch.Tensor,
    slot_T: torch.Tensor,
    interleaved: bool,
) -> None:
    """`cache` [num_blocks, S, L + P]. H may be 0: rows alone are finished."""
    num_tokens, num_heads, width = query_THD.shape
    if not num_tokens:
        return
    heads = min(32, next_power_of_2(max(num_heads, 1)))  # of a program; a guess
    store_and_rotate_kernel[(num_tokens, 1 + cdiv(num_heads, heads))](
        query_THD, row_TR, gain_L, position_T, cos_sin_CP, cache, slot_T, *query_THD.stride()[:2], row_TR.stride(0),
        *cache.stride()[:2], eps, NUM_HEADS=num_heads, HEADS=heads, KEY=width - cos_sin_CP.shape[1],
        **row_constants(len(gain_L), cos_sin_CP.shape[1], cache.shape[1], interleaved=interleaved),
        num_warps=4, **overlap(query_THD.device),
    )  # fmt: skip


def row_constants(latent: int, num_rotated: int, block_size: int, *, interleaved: bool) -> dict[str, int | bool]:
    half = num_rotated // 2
    return {
        "LATENT": latent,
        "L_PAD": next_power_of_2(latent),
        "HALF": half,
        "HALF_PAD": next_power_of_2(half),
        "BLOCK_SIZE": block_size,
        "INTERLEAVED": interleaved,
    }
