"""Products with adapters of low rank: out += x A^T B^T, where tiles of rows take different A and B.

T rows, K inputs, N outputs, R rank (padded), P parts (merged projections, each with an A of its own), S splits of K.
The grouping of rows by adapter follows Punica's SGMV (arXiv 2310.18547).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, dot, overlap

WANTED_PROGRAMS = 512  # a guess: a few for each multiprocessor
MAX_SPLITS = 8  # a guess, as the block sizes
BLOCK_K, BLOCK_N = 256, 128
NEVER = 1 << 30


@triton.jit(do_not_specialize=["num_rows", "splits"])
def shrink_kernel(
    x,  # [T, K], strides (x_row, 1)
    a,  # [slots, P * R, K], strides (a_slot, K, 1)
    ranks,  # int32 [slots, P], strides (rank_slot, 1); 0: the adapter leaves this projection alone
    tiles,  # int32 [tiles, 3] contiguous: first row, number of rows, slot counted from 1 (0: no adapter)
    low,  # fp32 [S, T, P, R] contiguous
    x_row,
    a_slot,
    rank_slot,
    num_rows,
    splits,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, P, S): one split's share of x A^T for a tile of rows and one part."""
    begin(PDL)
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64) - 1
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks + slot * rank_slot + part)
    if rank > 0:
        rows = tl.load(tiles + 3 * tile).to(tl.int64) + tl.arange(0, BLOCK_M)
        row_mask = tl.arange(0, BLOCK_M) < tl.load(tiles + 3 * tile + 1)
        inner = tl.arange(0, RANK)
        matrix = a + slot * a_slot + part * RANK * SIZE
        total = tl.zeros([BLOCK_M, RANK], tl.float32)
        for start in range(split * BLOCK_K, SIZE, splits * BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            inside = columns < SIZE
            values = tl.load(x + rows[:, None] * x_row + columns[None, :], row_mask[:, None] & inside[None, :], 0.0)
            wanted = inside[:, None] & (inner < rank)[None, :]
            total += dot(values, tl.load(matrix + inner[None, :] * SIZE + columns[:, None], wanted, 0.0))
        place = ((split.to(tl.int64) * num_rows + rows) * PARTS + part) * RANK
        tl.store(low + place[:, None] + inner[None, :], total, row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows", "splits"])
def expand_kernel(
    low,  # fp32 [S, T, P, R] contiguous
    b,  # [slots, N, R], strides (b_slot, R, 1)
    ranks,  # as in shrink_kernel
    tiles,
    out,  # [T, N], strides (out_row, 1)
    b_slot,
    rank_slot,
    out_row,
    num_rows,
    splits,
    START_1: tl.constexpr,  # outputs at which the second and the third part begin; N where there is none
    START_2: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST_1: tl.constexpr,  # the first program of the second and the third part; NEVER where there is none
    FIRST_2: tl.constexpr,
    GROUP: tl.constexpr,  # > 0: outputs of the two parts take turns, GROUP of each (group_gate_up)
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, blocks of outputs): out += the sum over splits times B^T. No block crosses parts."""
    begin(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    part = (block >= FIRST_1).to(tl.int32) + (block >= FIRST_2).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, START_1, START_2))
    stop = tl.where(part == 0, START_1, tl.where(part == 1, START_2, SIZE))
    first = tl.where(part == 0, 0, tl.where(part == 1, FIRST_1, FIRST_2))
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64) - 1
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks + slot * rank_slot + part)
    if rank > 0:
        rows = tl.load(tiles + 3 * tile).to(tl.int64) + tl.arange(0, BLOCK_M)
        row_mask = tl.arange(0, BLOCK_M) < tl.load(tiles + 3 * tile + 1)
        inner = tl.arange(0, RANK)
        place = (rows * PARTS + part) * RANK
        total = tl.zeros([BLOCK_M, RANK], tl.float32)
        for split in range(splits):
            earlier = (rows * 0 + split) * num_rows * (PARTS * RANK)  # in 64 bits
            at_row = (earlier + place)[:, None]
            total += tl.load(low + at_row + inner[None, :], row_mask[:, None], 0.0)
        outputs = start + (block - first) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = outputs < stop
        wanted = (inner < rank)[:, None] & inside[None, :]
        matrix = tl.load(b + slot * b_slot + outputs[None, :] * RANK + inner[:, None], wanted, 0.0)
        added = dot(total.to(b.dtype.element_ty), matrix)
        columns = outputs
        if GROUP > 0:
            within = outputs - start
            columns = within // GROUP * (2 * GROUP) + part * GROUP + within % GROUP
        at = out + rows[:, None] * out_row + columns[None, :]
        mask = row_mask[:, None] & inside[None, :]
        old = tl.load(at, mask, 0.0).to(tl.float32)
        tl.store(at, (old + added).to(out.dtype.element_ty), mask)


def add_adapters_triton(
    out_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    part_sizes: tuple[int, ...],
    tiles: torch.Tensor,
    tile_rows: int,
    group: int,
) -> None:
    """Launches both kernels; see kernels/products/adapters.py for what the arguments mean."""
    num_rows, size, parts = x_TK.shape[0], x_TK.shape[1], len(part_sizes)
    rank, num_tiles = a.shape[1] // parts, tiles.shape[0]
    if not num_tiles:
        return
    splits = max(1, min(MAX_SPLITS, WANTED_PROGRAMS // (num_tiles * parts), size // BLOCK_K))
    low = torch.empty((splits, num_rows, parts, rank), dtype=torch.float32, device=x_TK.device)
    shrink_kernel[(num_tiles, parts, splits)](
        x_TK, a, ranks, tiles, low, x_TK.stride(0), a.stride(0), ranks.stride(0), num_rows, splits,
        SIZE=size, PARTS=parts, RANK=rank, BLOCK_M=tile_rows, BLOCK_K=_inner_block(rank),
        num_warps=4, **overlap(x_TK.device),
    )  # fmt: skip
    blocks = [triton.cdiv(part, BLOCK_N) for part in part_sizes]
    starts = [sum(part_sizes[:index]) for index in (1, 2)]
    firsts = [sum(blocks[:index]) if index < parts else NEVER for index in (1, 2)]
    expand_kernel[(num_tiles, sum(blocks))](
        low, b, ranks, tiles, out_TN, b.stride(0), ranks.stride(0), out_TN.stride(0), num_rows, splits,
        START_1=starts[0], START_2=starts[1], SIZE=sum(part_sizes), FIRST_1=firsts[0], FIRST_2=firsts[1],
        GROUP=group, PARTS=parts, RANK=rank, BLOCK_M=tile_rows, BLOCK_N=BLOCK_N,
        num_warps=4, **overlap(x_TK.device),
    )  # fmt: skip


def _inner_block(rank: int) -> int:
    """Inputs that a program multiplies at once: less for large ranks, so that a tile of A stays in registers."""
    return max(32, min(BLOCK_K, 8192 // rank))
