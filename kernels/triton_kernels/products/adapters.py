"""Products with adapters of low rank: out += x A^T B^T, where tiles of rows take different A and B.

T rows, K inputs, N outputs, R rank (padded), P parts (merged projections, each with an A of its own), L = P * R lanes,
S splits of K. The grouping of rows by adapter follows Punica's SGMV (arXiv 2310.18547).

`shrink` comes before the product that it goes beside, whose weights are on their way meanwhile, and `expand` after it.
What adapters and tiles say is read before the kernel in front has ended: nothing but torch's copies writes it. Splits
follow from sizes alone, so a row's sums don't depend on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.products.adapter_rows import FEW_TILE_ROWS, AdapterRows, AdapterStack
from tandem.kernels.triton_kernels.common import dot, overlap

EXPAND_PROGRAMS = 1024  # a guess: as many as are on the device at once
MOST_LANES = 64  # of a program; a guess, as all sizes here
# Of few rows: programs do one block of inputs, or two, and few enough splits for `expand` to have all in flight.
FEW_TILE_BYTES, MOST_INPUTS, MOST_SPLITS, SPLIT_RANKS = 32 << 10, 512, 32, 1024
MANY_INPUTS, MANY_SPLITS = 64, 4
NEVER = 1 << 30


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x,  # [T, K], strides (x_row, 1)
    a,  # [slots, L, K], strides (a_slot, K, 1)
    ranks,  # int32 [slots, P], strides (rank_slot, 1); 0: the adapter leaves this projection alone
    order,  # int32 [T]: the rows, sorted by adapter
    tiles,  # int32 [tiles, 3] contiguous: first place in `order`, number of rows, slot counted from 1 (0: no adapter)
    low,  # fp32 [S, T, L] contiguous, rows in `order`
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
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    rank = tl.load(ranks + (slot - 1) * rank_slot + lanes // RANK, (lanes < LANES) & (slot > 0), 0)
    has_lane = lanes % RANK < rank
    columns = split * BLOCK_K + tl.arange(0, BLOCK_K)
    matrix = a + (slot - 1) * a_slot + lanes[None, :] * SIZE
    block = tl.load(matrix + columns[:, None], has_lane[None, :] & (columns < SIZE)[:, None], 0.0)
    places = tl.arange(0, BLOCK_M)
    row_mask = places < count
    rows = tl.load(order + first + places, row_mask, 0).to(tl.int64)
    if (slot > 0) | (tile == 0):  # who waits makes the kernel end after the one before
        _wait(PDL)
    if slot > 0:
        at = x + rows[:, None] * x_row
        values = tl.load(at + columns[None, :], row_mask[:, None] & (columns < SIZE)[None, :], 0.0)
        total = dot(values, block)
        for start in range((split + SPLITS) * BLOCK_K, SIZE, SPLITS * BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            values = tl.load(at + inputs[None, :], row_mask[:, None] & (inputs < SIZE)[None, :], 0.0)
            total += dot(values, tl.load(matrix + inputs[:, None], has_lane[None, :] & (inputs < SIZE)[:, None], 0.0))
        place = (split.to(tl.int64) * num_rows + first + places) * LANES
        tl.store(low + place[:, None] + lanes[None, :], total, row_mask[:, None] & (lanes < LANES)[None, :])


@triton.jit
def _outputs_of(b, ranks, tiles, tile, num_tiles, part, outputs, inside, b_slot, rank_slot, RANK: tl.constexpr):
    """(rank, B^T [RANK, outputs]) of the adapter of a tile; 0 and zeros where there is none."""
    slot = tl.load(tiles + 3 * tile + 2, tile < num_tiles, 0).to(tl.int64)
    rank = tl.load(ranks + (slot - 1) * rank_slot + part, slot > 0, 0)
    inner = tl.arange(0, RANK)
    wanted = (inner < rank)[:, None] & inside[None, :]
    return rank, tl.load(b + (slot - 1) * b_slot + outputs[None, :] * RANK + inner[:, None], wanted, 0.0)


@triton.jit
def _added(
    low, matrix, first, row_mask, part, num_rows,
    LANES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, outputs] for the places from `first` on: the splits' sum, in their order, times B^T."""
    at = (first + tl.arange(0, BLOCK_M))[:, None] * LANES + (part * RANK + tl.arange(0, RANK))[None, :]
    total = tl.zeros([BLOCK_M, RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(low + at + (first * 0 + split) * num_rows * LANES, row_mask[:, None], 0.0)
    return dot(total.to(matrix.dtype), matrix)


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    low,  # as in shrink_kernel, like what isn't said here
    b,  # [slots, N, R], strides (b_slot, R, 1)
    ranks,
    order,
    tiles,
    num_tiles,  # int32 [1]: what is beyond so many tiles is not read
    out,  # [T, N], strides (out_row, 1)
    b_slot,
    rank_slot,
    out_row,
    num_rows,
    START_1: tl.constexpr,  # outputs at which the second and the third part begin; N where there is none
    START_2: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST_1: tl.constexpr,  # the first program of the second and the third part; NEVER where there is none
    FIRST_2: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (any number, which take turns with the tiles; blocks of outputs): out += low B^T. No block crosses parts."""
    if PDL:
        gdc_launch_dependents()
    block, count = tl.program_id(1), tl.load(num_tiles)
    part = (block >= FIRST_1).to(tl.int32) + (block >= FIRST_2).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, START_1, START_2))
    stop = tl.where(part == 0, START_1, tl.where(part == 1, START_2, SIZE))
    outputs = start + (block - tl.where(part == 0, 0, tl.where(part == 1, FIRST_1, FIRST_2))) * BLOCK_N
    outputs += tl.arange(0, BLOCK_N)
    inside = outputs < stop
    tile = tl.program_id(0)
    rank, matrix = _outputs_of(b, ranks, tiles, tile, count, part, outputs, inside, b_slot, rank_slot, RANK)
    _wait(PDL)
    while tile < count:
        first, places = tl.load(tiles + 3 * tile).to(tl.int64), tl.arange(0, BLOCK_M)
        row_mask = (places < tl.load(tiles + 3 * tile + 1)) & (rank > 0)
        rows = tl.load(order + first + places, row_mask, 0).to(tl.int64)
        at = out + rows[:, None] * out_row + outputs[None, :]
        mask = row_mask[:, None] & inside[None, :]
        old = tl.load(at, mask, 0.0).to(tl.float32)
        added = _added(low, matrix, first, row_mask, part, num_rows, LANES, RANK, SPLITS, BLOCK_M)
        tl.store(at, (old + added).to(out.dtype.element_ty), mask)
        tile += tl.num_programs(0)
        rank, matrix = _outputs_of(b, ranks, tiles, tile, count, part, outputs, inside, b_slot, rank_slot, RANK)


@triton.jit(do_not_specialize=["num_rows"])
def expand_silu_kernel(
    low,  # as in expand_kernel, like what isn't said here; two parts, gate and up
    b,  # [slots, 2 * SIZE, R]: outputs of gate, then of up
    ranks,
    order,
    tiles,
    num_tiles,
    gate_up,  # [T, 2 * SIZE], strides (row, 1): by turns GROUP columns of gate and of up
    out,  # [T, SIZE] contiguous
    b_slot,
    rank_slot,
    row,
    num_rows,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid as in expand_kernel: silu(gate + low B^T) * (up + low B^T), for rows without an adapter, too."""
    if PDL:
        gdc_launch_dependents()
    count, tile = tl.load(num_tiles), tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < SIZE
    turns = columns // GROUP * (2 * GROUP) + columns % GROUP
    _, of_gate = _outputs_of(b, ranks, tiles, tile, count, 0, columns, inside, b_slot, rank_slot, RANK)
    _, of_up = _outputs_of(b, ranks, tiles, tile, count, 1, SIZE + columns, inside, b_slot, rank_slot, RANK)
    _wait(PDL)
    while tile < count:
        first, places = tl.load(tiles + 3 * tile).to(tl.int64), tl.arange(0, BLOCK_M)
        row_mask = places < tl.load(tiles + 3 * tile + 1)
        has_low = row_mask & (tl.load(tiles + 3 * tile + 2) > 0)
        rows = tl.load(order + first + places, row_mask, 0).to(tl.int64)
        mask = row_mask[:, None] & inside[None, :]
        at = gate_up + rows[:, None] * row + turns[None, :]
        gate = tl.load(at, mask, 0.0).to(tl.float32)
        up = tl.load(at + GROUP, mask, 0.0).to(tl.float32)
        gate += _added(low, of_gate, first, has_low, 0, num_rows, 2 * RANK, RANK, SPLITS, BLOCK_M)
        up += _added(low, of_up, first, has_low, 1, num_rows, 2 * RANK, RANK, SPLITS, BLOCK_M)
        activated = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + rows[:, None] * SIZE + columns[None, :], activated.to(out.dtype.element_ty), mask)
        tile += tl.num_programs(0)
        _, of_gate = _outputs_of(b, ranks, tiles, tile, count, 0, columns, inside, b_slot, rank_slot, RANK)
        _, of_up = _outputs_of(b, ranks, tiles, tile, count, 1, SIZE + columns, inside, b_slot, rank_slot, RANK)


class ShrinkPlan(NamedTuple):
    """How shrink_kernel cuts lanes and inputs."""

    chunk: int
    block: int
    splits: int

    @classmethod
    def of(cls, lanes: int, rank: int, num_inputs: int, tile_rows: int, itemsize: int) -> ShrinkPlan:
        chunk = min(MOST_LANES, triton.next_power_of_2(lanes))
        if tile_rows > FEW_TILE_ROWS:
            block, most = MANY_INPUTS, MANY_SPLITS
        else:
            block = min(MOST_INPUTS, FEW_TILE_BYTES // (chunk * itemsize))
            most = max(MANY_SPLITS, min(MOST_SPLITS, SPLIT_RANKS // rank))
        return cls(chunk, block, min(most, triton.cdiv(num_inputs, block)))


def shrink_triton(x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> torch.Tensor:
    """These launch one kernel each; see kernels/products/adapters.py for what the arguments mean."""
    (num_rows, size), lanes, a, ranks = x_TK.shape, stack.a.shape[1], stack.a, stack.ranks
    plan = ShrinkPlan.of(lanes, stack.rank, size, rows.tile_rows, x_TK.element_size())
    low = torch.empty((plan.splits, num_rows, lanes), dtype=torch.float32, device=x_TK.device)
    shrink_kernel[(len(rows.tiles), triton.cdiv(lanes, plan.chunk), plan.splits)](
        x_TK, a, ranks, rows.order, rows.tiles, low, x_TK.stride(0), a.stride(0), ranks.stride(0), num_rows,
        SIZE=size, LANES=lanes, RANK=stack.rank, SPLITS=plan.splits, CHUNK=plan.chunk,
        BLOCK_M=rows.tile_rows, BLOCK_K=plan.block,
        num_warps=4, num_stages=1 if rows.tile_rows == FEW_TILE_ROWS else 3, **overlap(x_TK.device),
    )  # fmt: skip
    return low


def expand_triton(out_TN: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
    b, ranks, sizes, block = stack.b, stack.ranks, stack.part_sizes, _output_block(stack.rank, 128)
    blocks = [triton.cdiv(size, block) for size in sizes]
    starts = [sum(sizes[:index]) for index in (1, 2)]
    firsts = [sum(blocks[:index]) if index < len(sizes) else NEVER for index in (1, 2)]
    expand_kernel[_grid(rows, sum(blocks))](
        low, b, ranks, rows.order, rows.tiles, rows.num_tiles, out_TN,
        b.stride(0), ranks.stride(0), out_TN.stride(0), len(out_TN),
        START_1=starts[0], START_2=starts[1], SIZE=sum(sizes), FIRST_1=firsts[0], FIRST_2=firsts[1],
        LANES=low.shape[2], BLOCK_N=block, **_constants(low, stack, rows),
    )  # fmt: skip


def expand_silu_mul_triton(
    gate_up_TG: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int
) -> torch.Tensor:
    (num_rows, both), b, ranks, block = gate_up_TG.shape, stack.b, stack.ranks, _output_block(stack.rank, 64)
    out = torch.empty((num_rows, both // 2), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    expand_silu_kernel[_grid(rows, triton.cdiv(both // 2, block))](
        low, b, ranks, rows.order, rows.tiles, rows.num_tiles, gate_up_TG, out,
        b.stride(0), ranks.stride(0), gate_up_TG.stride(0), num_rows,
        SIZE=both // 2, GROUP=group or both // 2, BLOCK_N=block, **_constants(low, stack, rows),
    )  # fmt: skip
    return out


def _constants(low: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> dict[str, Any]:
    return {
        "RANK": stack.rank, "SPLITS": low.shape[0], "BLOCK_M": rows.tile_rows,
        "num_warps": 4, "num_stages": 1, **overlap(low.device),
    }  # fmt: skip


def _grid(rows: AdapterRows, blocks: int) -> tuple[int, int]:
    return max(1, min(len(rows.tiles), EXPAND_PROGRAMS // blocks)), blocks


def _output_block(rank: int, most: int) -> int:
    """Outputs that a program does at once: less for large ranks, so that a tile of B stays in registers."""
    return max(16, min(most, 4096 // rank))
