"""Products with adapters of prompts: tiles of rows that take one adapter, by tensor cores. Letters as in
adapter_rows.py."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.adapters.rows import part_of
from tandem.kernels.triton_kernels.common import begin, dot


@triton.jit(do_not_specialize=["num_rows"])
def shrink_tiles_kernel(
    x,  # as in shrink_rows_kernel, like what isn't said here
    a,
    ranks,
    order,
    tiles,  # int32 [tiles, 3] contiguous: first place, number of places, slot
    low,
    x_row,
    a_slot,
    rank_slot,
    num_rows,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, ceil(L / CHUNK), S): one split's share of x A^T for a tile of rows and some lanes."""
    begin(PDL)
    tile, split = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64) - 1
    lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    rank = tl.load(ranks + slot * rank_slot + lanes // RANK, lanes < LANES, 0)
    has_lane = (lanes % RANK < rank)[None, :]
    matrix = a + slot * a_slot + lanes[None, :] * SIZE
    places = tl.arange(0, BLOCK_M)
    row_mask = (places < count)[:, None]
    at = x + tl.load(order + first + places, places < count, 0).to(tl.int64)[:, None] * x_row
    total = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    for start in range(split * BLOCK_K, SIZE, SPLITS * BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        values = tl.load(at + columns[None, :], row_mask & (columns < SIZE)[None, :], 0.0)
        total += dot(values, tl.load(matrix + columns[:, None], has_lane & (columns < SIZE)[:, None], 0.0))
    place = (split.to(tl.int64) * num_rows + first + places) * LANES
    tl.store(low + place[:, None] + lanes[None, :], total, row_mask & (lanes < LANES)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def expand_tiles_kernel(
    low,  # as in shrink_tiles_kernel, like what isn't said here
    b,  # and as in expand_rows_kernel
    ranks,
    order,
    tiles,
    out,
    b_slot,
    rank_slot,
    out_row,
    num_rows,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST_1: tl.constexpr,
    FIRST_2: tl.constexpr,
    GROUP: tl.constexpr,  # > 0: outputs of the two parts take turns, GROUP of each (group_gate_up)
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,  # RANK, or what tl.dot takes at least
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, blocks of outputs): out += the sum over splits times B^T. No block crosses parts."""
    begin(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    part, outputs, stop = part_of(block, START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64) - 1
    rank = tl.load(ranks + slot * rank_slot + part)
    if rank > 0:
        first, places, inner = tl.load(tiles + 3 * tile).to(tl.int64), tl.arange(0, BLOCK_M), tl.arange(0, INNER)
        row_mask = places < tl.load(tiles + 3 * tile + 1)
        rows = tl.load(order + first + places, row_mask, 0).to(tl.int64)
        total, is_lane = tl.zeros([BLOCK_M, INNER], tl.float32), inner < RANK
        for split in tl.static_range(SPLITS):
            place = ((first * 0 + split) * num_rows + first + places) * LANES + part * RANK
            total += tl.load(low + place[:, None] + inner[None, :], row_mask[:, None] & is_lane[None, :], 0.0)
        inside = outputs < stop
        matrix = tl.load(
            b + slot * b_slot + outputs[None, :] * RANK + inner[:, None], inside[None, :] & is_lane[:, None], 0.0
        )
        added = dot(total.to(b.dtype.element_ty), matrix)
        columns = outputs
        if GROUP > 0:
            within = outputs - part * START_1
            columns = within // GROUP * (2 * GROUP) + part * GROUP + within % GROUP
        at = out + rows[:, None] * out_row + columns[None, :]
        mask = row_mask[:, None] & inside[None, :]
        old = tl.load(at, mask, 0.0).to(tl.float32)
        tl.store(at, (old + added).to(out.dtype.element_ty), mask)
