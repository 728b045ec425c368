"""Products of decode rows with their heads' matrices: queries over latents, and values of sums of latents.

M rows, H heads, N elements of a head's key without a position, P rotated ones, L latent size, V elements of a value. A
head's matrix is read once for each ROWS rows, straight to registers: of few rows that is what bounds these, so a
program asks for its first weights before the kernel in front has ended.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, cdiv, dot, overlap, padded_head_size
from tandem.kernels.triton_kernels.latents.new_rows import finish_rows, row_constants, turned

ROWS = 16  # of a product: what the tensor cores take at least, so that one kernel serves any number of rows
LATENT_ROWS: tl.constexpr = tl.constexpr(4)  # rows of a program that stores; a guess


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions", "slots"])
def store_and_absorb_kernel(
    query,  # [M, H, N + P], strides (query_row, query_head, 1)
    latents,  # [M, L + P], strides (latent_row, 1)
    weight,  # [H, N, L], strides (weight_head, weight_row, 1)
    gain,  # [L]
    positions,  # int64 [M]
    cos_sin,  # fp32 [C, P] contiguous: cos of a position's angles, then sin
    out,  # [M, H, L + P] contiguous
    cache,  # [num_blocks, S, L + P], strides (cache_block, cache_slot, 1)
    slots,  # int64 [M]; -1: not stored
    num_rows,
    query_row,
    query_head,
    latent_row,
    weight_head,
    weight_row,
    cache_block,
    cache_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr,  # N
    KEY_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,  # ceil(L / COLUMNS)
    LATENT: tl.constexpr,
    L_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (H * TILES + ROWS / LATENT_ROWS, ceil(M / ROWS)): some columns of a head's queries, of which the first
    also rotates; then rows of the cache."""
    place, first_row = tl.program_id(0), tl.program_id(1) * ROWS
    head = place // TILES
    columns, inner = place % TILES * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, KEY_PAD)
    used = (inner < KEY)[:, None] & (columns < LATENT)[None, :] & (head < NUM_HEADS)
    matrix = tl.load(
        weight + head.to(tl.int64) * weight_head + inner[:, None] * weight_row + columns[None, :], mask=used, other=0.0
    )
    begin(PDL)
    if place < NUM_HEADS * TILES:
        rows = first_row + tl.arange(0, ROWS)
        there = rows < num_rows
        source = query + rows.to(tl.int64)[:, None] * query_row + head * query_head
        plain = tl.load(source + inner[None, :], mask=there[:, None] & (inner < KEY)[None, :], other=0.0)
        target = out + (rows.to(tl.int64)[:, None] * NUM_HEADS + head) * (LATENT + 2 * HALF)
        product = dot(plain, matrix).to(out.dtype.element_ty)
        tl.store(target + columns[None, :], product, mask=there[:, None] & (columns < LATENT)[None, :])
        if place % TILES == 0:
            pairs = tl.arange(0, HALF_PAD)
            mask = there[:, None] & (pairs < HALF)[None, :]
            angles = cos_sin + tl.load(positions + rows, mask=there, other=0)[:, None] * (2 * HALF) + pairs[None, :]
            cos = tl.load(angles, mask=mask, other=0.0)
            sin = tl.load(angles + HALF, mask=mask, other=0.0)
            STEP: tl.constexpr = 1 if INTERLEAVED else HALF
            at = pairs[None, :] * (2 if INTERLEAVED else 1)
            first, second = turned(source + KEY + at, mask, cos, sin, STEP, out.dtype.element_ty)
            tl.store(target + LATENT + at, first, mask=mask)
            tl.store(target + LATENT + at + STEP, second, mask=mask)
    else:
        stored = first_row + (place - NUM_HEADS * TILES) * LATENT_ROWS + tl.arange(0, LATENT_ROWS)
        finish_rows(
            stored, stored < num_rows, latents, gain, positions, cos_sin, cache, slots, latent_row, cache_block,
            cache_slot, eps, LATENT, L_PAD, HALF, HALF_PAD, BLOCK_SIZE, INTERLEAVED, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def values_kernel(
    summed,  # [M, H, L], strides (summed_row, summed_head, 1)
    weight,  # [H, V, L], strides (weight_head, weight_row, 1)
    out,  # [M, H, V] contiguous
    num_rows,
    summed_row,
    summed_head,
    weight_head,
    weight_row,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,  # V
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,  # ceil(V / COLUMNS)
    INNER: tl.constexpr,  # of a step
    STEPS: tl.constexpr,  # ceil(L / INNER)
    PDL: tl.constexpr,
):
    """Grid (H * TILES, ceil(M / ROWS)): some columns of a head's values."""
    head = tl.program_id(0) // TILES
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns, inner = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    weights = weight + head.to(tl.int64) * weight_head + columns[:, None] * weight_row + inner[None, :]
    is_value = (columns < VALUE)[:, None]
    following = tl.load(weights, mask=is_value & (inner < LATENT)[None, :], other=0.0)
    begin(PDL)
    source = summed + rows.to(tl.int64)[:, None] * summed_row + head * summed_head + inner[None, :]
    there = (rows < num_rows)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        matrix = following
        if step + 1 < STEPS:
            left = (inner < LATENT - (step + 1) * INNER)[None, :]
            following = tl.load(weights + (step + 1) * INNER, mask=is_value & left, other=0.0)
        mask = there & (inner < LATENT - step * INNER)[None, :]
        total += dot(tl.load(source + step * INNER, mask=mask, other=0.0), tl.trans(matrix))
    target = out + (rows.to(tl.int64)[:, None] * NUM_HEADS + head) * VALUE + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there & (columns < VALUE)[None, :])


def absorb_constants(num_heads: int, key_width: int, latent: int, dtype: torch.dtype) -> dict[str, int]:
    """So many columns that one row of 16 heads has a program for each multiprocessor; a guess."""
    columns = min(64 if dtype.itemsize == 2 else 32, padded_head_size(latent))
    return {
        "NUM_HEADS": num_heads,
        "KEY": key_width,
        "KEY_PAD": padded_head_size(key_width),
        "ROWS": ROWS,
        "COLUMNS": columns,
        "TILES": -(-latent // columns),
    }


def values_constants(num_heads: int, value_width: int, latent: int, dtype: torch.dtype) -> dict[str, int]:
    """Columns are as few as `absorb_constants` has them; of 16 bits all of a head's sums are loaded at once."""
    columns = min(16, padded_head_size(value_width))
    inner = min(512 if dtype.itemsize == 2 else 128, padded_head_size(latent))
    return {
        "NUM_HEADS": num_heads,
        "VALUE": value_width,
        "LATENT": latent,
        "ROWS": ROWS,
        "COLUMNS": columns,
        "TILES": -(-value_width // columns),
        "INNER": inner,
        "STEPS": -(-latent // inner),
    }


def store_and_absorb_triton(
    query_MHD: torch.Tensor,
    row_MR: torch.Tensor,
    key_HNL: torch.Tensor,
    gain_L: torch.Tensor,
    eps: float,
    position_M: torch.Tensor,
    cos_sin_CP: torch.Tensor,
    cache: torch.Tensor,
    slot_M: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """[M, H, L + P]. `cache` [num_blocks, S, L + P]."""
    num_rows, num_heads, _ = query_MHD.shape
    _, key_width, latent = key_HNL.shape
    out = query_MHD.new_empty(num_rows, num_heads, row_MR.shape[1])
    if not num_rows:
        return out
    constants = absorb_constants(num_heads, key_width, latent, query_MHD.dtype)
    storing = ROWS // LATENT_ROWS.value
    grid = num_heads * constants["TILES"] + storing, cdiv(num_rows, constants["ROWS"])
    store_and_absorb_kernel[grid](
        query_MHD, row_MR, key_HNL, gain_L, position_M, cos_sin_CP, out, cache, slot_M, num_rows,
        *query_MHD.stride()[:2], row_MR.stride(0), *key_HNL.stride()[:2], *cache.stride()[:2], eps, **constants,
        **row_constants(latent, cos_sin_CP.shape[1], cache.shape[1], interleaved=interleaved),
        num_warps=4, **overlap(query_MHD.device),
    )  # fmt: skip
    return out


def values_triton(summed_MHL: torch.Tensor, value_HVL: torch.Tensor, out_MHV: torch.Tensor) -> None:
    num_rows, num_heads, latent = summed_MHL.shape
    if not num_rows:
        return
    constants = values_constants(num_heads, value_HVL.shape[1], latent, summed_MHL.dtype)
    values_kernel[(num_heads * constants["TILES"], cdiv(num_rows, constants["ROWS"]))](
        summed_MHL, value_HVL, out_MHV, num_rows, *summed_MHL.stride()[:2], *value_HVL.stride()[:2], **constants,
        num_warps=4, **overlap(summed_MHL.device),
    )  # fmt: skip
