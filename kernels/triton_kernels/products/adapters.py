"""Products with adapters of low rank: out += x A^T B^T, where rows take different A and B.

T rows, K inputs, N outputs, R rank (padded), P parts (merged projections, each with an A of its own), L = P * R lanes,
S splits of K. Rows stand sorted by adapter, as in Punica's SGMV (arXiv 2310.18547); a place is a row's place in that
order.

Rows of decode steps are multiplied and added up without tensor cores, two places a program, each with its own
matrices: what bounds them is how many loads follow on each other, so none is longer than place, rank, matrix, and
matrices are on their way before the kernel in front has ended (nothing but torch's copies writes them). Splits follow
from sizes alone, so a row's sums don't depend on the rows beside it. Prompts go by tiles of rows with one adapter.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.products.adapter_rows import TILE_ROWS, AdapterRows, AdapterStack
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.triton_kernels.common import begin, dot, overlap

# Of decode rows: places of a program, splits times lanes at most, words of B at once; docs/measurements.md#adapters.
PLACES, SPLIT_LANES, WORDS_OF_B = 2, 384, 4096
# Guesses: lanes of a program, inputs at once and of a split at least; blocks of outputs of a program that ends in silu.
CHUNK, BLOCK_K, LEAST_INPUTS, BLOCKS = 16, 128, 256, 1
# Of prompts, guesses too.
TILE_K, TILE_LANES, TILE_SPLITS, WORDS_OF_TILE = 64, 64, 4, 4096
NEVER = 1 << 30


@triton.jit
def _start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def shrink_rows_kernel(
    x,  # [T, K], strides (x_row, 1)
    a,  # [slots, L, K], strides (a_slot, K, 1)
    ranks,  # int32 [slots, P], strides (rank_slot, 1); 0: the adapter leaves this projection alone
    order,  # int32 [T]: the row at each place
    slots,  # int32 [T]: the slot of its adapter, counted from 1; 0: none
    low,  # fp32 [S, T, L] contiguous, by place
    x_row,
    a_slot,
    rank_slot,
    num_rows,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / PLACES), L / CHUNK, S): one split's share of x A^T for some places and lanes."""
    _start(PDL)
    places = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    split = tl.program_id(2)
    slot = tl.load(slots + places, places < num_rows, 0).to(tl.int64)
    rows = tl.load(order + places, places < num_rows, 0).to(tl.int64)
    lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    rank = tl.load(ranks + (slot - 1) * rank_slot + tl.program_id(1) * CHUNK // RANK, slot > 0, 0)
    wanted = ((lanes % RANK)[None, :] < rank[:, None])[:, :, None]
    matrix = a + ((slot - 1) * a_slot)[:, None, None] + (lanes * SIZE)[None, :, None]
    columns = split * BLOCK_K + tl.arange(0, BLOCK_K)
    block = tl.load(matrix + columns[None, None, :], wanted & (columns < SIZE)[None, None, :], 0.0)
    _wait(PDL)
    total = tl.zeros([PLACES, CHUNK, BLOCK_K // 8], tl.float32)  # each of what one thread loads at once
    at, has_rank = x + (rows * x_row)[:, None], (rank > 0)[:, None]
    for _ in range(split * BLOCK_K, SIZE, SPLITS * BLOCK_K):
        values = tl.load(at + columns[None, :], has_rank & (columns < SIZE)[None, :], 0.0).to(tl.float32)
        product = block.to(tl.float32) * values[:, None, :]
        total += tl.sum(product.reshape(PLACES, CHUNK, BLOCK_K // 8, 8), 3)
        columns += SPLITS * BLOCK_K
        block = tl.load(matrix + columns[None, None, :], wanted & (columns < SIZE)[None, None, :], 0.0)
    target = low + ((split * num_rows + places) * LANES)[:, None] + lanes[None, :]
    tl.store(target, tl.sum(total, 2), has_rank)


@triton.jit
def _rows_of_b(b, slot, rank, outputs, inside, b_slot, RANK: tl.constexpr):
    """B [places, outputs, RANK] of the slots' adapters; zeros where there is none."""
    at = b + ((slot - 1) * b_slot)[:, None, None] + (outputs * RANK)[None, :, None] + tl.arange(0, RANK)[None, None, :]
    return tl.load(at, (rank > 0)[:, None, None] & inside[None, :, None], 0.0)


@triton.jit
def _sum_of(
    low, places, part, rank, num_rows,
    LANES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """fp32 [places, RANK]: the sum of the splits; zeros where there is no adapter."""
    split = tl.arange(0, SPLITS_PAD)
    at = (split[:, None] * num_rows + places[None, :]) * LANES + part * RANK
    mask = (split < SPLITS)[:, None] & (rank > 0)[None, :]
    return tl.sum(tl.load(low + at[:, :, None] + tl.arange(0, RANK)[None, None, :], mask[:, :, None], 0.0), 0)


@triton.jit
def _times(matrix, low):
    """[places, outputs]: low B^T."""
    return tl.sum(matrix.to(tl.float32) * low[:, None, :], 2)


@triton.jit(do_not_specialize=["num_rows"])
def expand_rows_kernel(
    low,  # as in shrink_rows_kernel, like what isn't said here
    b,  # [slots, N, R], strides (b_slot, R, 1); finite beyond a rank
    ranks,
    order,
    slots,
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
    SPLITS_PAD: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / PLACES), blocks of outputs): out += low B^T. No block crosses parts."""
    _start(PDL)
    places, block = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.program_id(1)
    slot = tl.load(slots + places, places < num_rows, 0).to(tl.int64)
    rows = tl.load(order + places, places < num_rows, 0).to(tl.int64)
    part, outputs, stop = _part_of(block, START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    rank = tl.load(ranks + (slot - 1) * rank_slot + part, slot > 0, 0)
    matrix = _rows_of_b(b, slot, rank, outputs, outputs < stop, b_slot, RANK)
    _wait(PDL)
    at, mask = out + (rows * out_row)[:, None] + outputs[None, :], (rank > 0)[:, None] & (outputs < stop)[None, :]
    old = tl.load(at, mask, 0.0).to(tl.float32)
    added = _times(matrix, _sum_of(low, places, part, rank, num_rows, LANES, RANK, SPLITS, SPLITS_PAD))
    tl.store(at, (old + added).to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def expand_silu_rows_kernel(
    low,  # as in expand_rows_kernel, like what isn't said here; two parts, gate and up
    b,  # [slots, 2 * SIZE, R]: outputs of gate, then of up
    ranks,
    order,
    slots,
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
    SPLITS_PAD: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / PLACES), ceil(SIZE / (BLOCKS * BLOCK_N))): silu(gate + low B^T) * (up + low B^T), for rows
    without an adapter, too."""
    _start(PDL)
    places = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    slot = tl.load(slots + places, places < num_rows, 0).to(tl.int64)
    rows = tl.load(order + places, places < num_rows, 0).to(tl.int64)
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, slot > 0, 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, slot > 0, 0)
    start = tl.program_id(1) * (BLOCKS * BLOCK_N)
    stop = tl.minimum(SIZE, start + BLOCKS * BLOCK_N)
    columns = start + tl.arange(0, BLOCK_N)
    of_gate = _rows_of_b(b, slot, gate_rank, columns, columns < stop, b_slot, RANK)
    of_up = _rows_of_b(b, slot, up_rank, SIZE + columns, columns < stop, b_slot, RANK)
    _wait(PDL)
    low_gate = _sum_of(low, places, 0, gate_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
    low_up = _sum_of(low, places, 1, up_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
    for _ in range(BLOCKS):
        mask = (places < num_rows)[:, None] & (columns < stop)[None, :]
        at = gate_up + (rows * row)[:, None] + (columns // GROUP * (2 * GROUP) + columns % GROUP)[None, :]
        gate = tl.load(at, mask, 0.0).to(tl.float32) + _times(of_gate, low_gate)
        up = tl.load(at + GROUP, mask, 0.0).to(tl.float32) + _times(of_up, low_up)
        activated = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + (rows * SIZE)[:, None] + columns[None, :], activated.to(out.dtype.element_ty), mask)
        columns += BLOCK_N
        of_gate = _rows_of_b(b, slot, gate_rank, columns, columns < stop, b_slot, RANK)
        of_up = _rows_of_b(b, slot, up_rank, SIZE + columns, columns < stop, b_slot, RANK)


@triton.jit
def _part_of(
    block, START_1: tl.constexpr, START_2: tl.constexpr, SIZE: tl.constexpr, FIRST_1: tl.constexpr,
    FIRST_2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(part, outputs, where the part ends) of a block of outputs."""
    part = (block >= FIRST_1).to(tl.int32) + (block >= FIRST_2).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, START_1, START_2))
    stop = tl.where(part == 0, START_1, tl.where(part == 1, START_2, SIZE))
    first = tl.where(part == 0, 0, tl.where(part == 1, FIRST_1, FIRST_2))
    return part, start + (block - first) * BLOCK_N + tl.arange(0, BLOCK_N), stop


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
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, blocks of outputs): out += the sum over splits times B^T. No block crosses parts."""
    begin(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    part, outputs, stop = _part_of(block, START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    slot = tl.load(tiles + 3 * tile + 2).to(tl.int64) - 1
    rank = tl.load(ranks + slot * rank_slot + part)
    if rank > 0:
        first, places, inner = tl.load(tiles + 3 * tile).to(tl.int64), tl.arange(0, BLOCK_M), tl.arange(0, RANK)
        row_mask = places < tl.load(tiles + 3 * tile + 1)
        rows = tl.load(order + first + places, row_mask, 0).to(tl.int64)
        total = tl.zeros([BLOCK_M, RANK], tl.float32)
        for split in tl.static_range(SPLITS):
            place = ((first * 0 + split) * num_rows + first + places) * LANES + part * RANK
            total += tl.load(low + place[:, None] + inner[None, :], row_mask[:, None], 0.0)
        inside = outputs < stop
        matrix = tl.load(b + slot * b_slot + outputs[None, :] * RANK + inner[:, None], inside[None, :], 0.0)
        added = dot(total.to(b.dtype.element_ty), matrix)
        columns = outputs
        if GROUP > 0:
            within = outputs - part * START_1
            columns = within // GROUP * (2 * GROUP) + part * GROUP + within % GROUP
        at = out + rows[:, None] * out_row + columns[None, :]
        mask = row_mask[:, None] & inside[None, :]
        old = tl.load(at, mask, 0.0).to(tl.float32)
        tl.store(at, (old + added).to(out.dtype.element_ty), mask)


def num_splits(lanes: int, num_inputs: int) -> int:
    """The number of parts in which the inputs of decode rows are cut."""
    return max(1, min(SPLIT_LANES // lanes, triton.cdiv(num_inputs, LEAST_INPUTS)))


def shrink_triton(x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> torch.Tensor:
    """These launch one kernel each; see kernels/products/adapters.py for what the arguments mean."""
    (num_rows, size), lanes, a, ranks = x_TK.shape, stack.a.shape[1], stack.a, stack.ranks
    splits = TILE_SPLITS if rows.tiles is not None else num_splits(lanes, size)
    low = torch.empty((splits, num_rows, lanes), dtype=torch.float32, device=x_TK.device)
    strides = x_TK.stride(0), a.stride(0), ranks.stride(0), num_rows
    common = {"SIZE": size, "LANES": lanes, "RANK": stack.rank, "SPLITS": splits, **overlap(x_TK.device)}
    if rows.tiles is None:
        shrink_rows_kernel[(triton.cdiv(num_rows, PLACES), lanes // CHUNK, splits)](
            x_TK, a, ranks, rows.order, rows.slots, low, *strides,
            PLACES=PLACES, CHUNK=CHUNK, BLOCK_K=BLOCK_K, num_warps=4, num_stages=1, **common,
        )  # fmt: skip
    elif len(rows.tiles):
        chunk = min(TILE_LANES, triton.next_power_of_2(lanes))
        shrink_tiles_kernel[(len(rows.tiles), triton.cdiv(lanes, chunk), splits)](
            x_TK, a, ranks, rows.order, rows.tiles, low, *strides,
            CHUNK=chunk, BLOCK_M=TILE_ROWS, BLOCK_K=TILE_K, num_warps=4, **common,
        )  # fmt: skip
    return low


def expand_triton(
    out_TN: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int = 0
) -> None:
    """`group` > 0, for prompts: outputs of the two parts take turns."""
    b, ranks, sizes, tiles = stack.b, stack.ranks, stack.part_sizes, rows.tiles
    block = (
        _outputs_at_once(WORDS_OF_B // PLACES, stack.rank)
        if tiles is None
        else _outputs_at_once(WORDS_OF_TILE, stack.rank)
    )
    blocks = [triton.cdiv(size, block) for size in sizes]
    starts = [sum(sizes[:index]) for index in (1, 2)]
    firsts = [sum(blocks[:index]) if index < len(sizes) else NEVER for index in (1, 2)]
    strides = b.stride(0), ranks.stride(0), out_TN.stride(0), len(out_TN)
    common = {
        "START_1": starts[0], "START_2": starts[1], "SIZE": sum(sizes), "FIRST_1": firsts[0], "FIRST_2": firsts[1],
        "LANES": low.shape[2], "RANK": stack.rank, "SPLITS": low.shape[0], "BLOCK_N": block,
        "num_warps": 4, **overlap(low.device),
    }  # fmt: skip
    if tiles is None:
        expand_rows_kernel[(triton.cdiv(len(out_TN), PLACES), sum(blocks))](
            low, b, ranks, rows.order, rows.slots, out_TN, *strides,
            SPLITS_PAD=triton.next_power_of_2(low.shape[0]), PLACES=PLACES, num_stages=1, **common,
        )  # fmt: skip
    elif len(tiles):
        expand_tiles_kernel[(len(tiles), sum(blocks))](
            low, b, ranks, rows.order, tiles, out_TN, *strides, GROUP=group, BLOCK_M=TILE_ROWS, **common
        )


def expand_silu_mul_triton(
    gate_up_TG: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int
) -> torch.Tensor:
    if rows.tiles is not None:
        expand_triton(gate_up_TG, low, stack, rows, group)
        return silu_mul(gate_up_TG, group)
    (num_rows, both), b, ranks = gate_up_TG.shape, stack.b, stack.ranks
    block = _outputs_at_once(WORDS_OF_B // (2 * PLACES), stack.rank)
    out = torch.empty((num_rows, both // 2), dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    constants: dict[str, Any] = {"RANK": stack.rank, "SPLITS": low.shape[0], "BLOCK_N": block, **overlap(low.device)}
    expand_silu_rows_kernel[(triton.cdiv(num_rows, PLACES), triton.cdiv(both // 2, BLOCKS * block))](
        low, b, ranks, rows.order, rows.slots, gate_up_TG, out,
        b.stride(0), ranks.stride(0), gate_up_TG.stride(0), num_rows,
        SIZE=both // 2, GROUP=group or both // 2, SPLITS_PAD=triton.next_power_of_2(low.shape[0]), PLACES=PLACES,
        BLOCKS=BLOCKS, num_warps=4, num_stages=1, **constants,
    )  # fmt: skip
    return out


def _outputs_at_once(words: int, rank: int) -> int:
    """Outputs of a program that holds so many words of B."""
    return max(16, min(128, words // rank))
