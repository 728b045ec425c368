"""Products with adapters of decode rows, places with matrices of their own.

T rows, K inputs, N outputs, R rank (padded), P parts (merged projections, each with an A of its own), L = P * R lanes,
S splits of K. Rows stand sorted by adapter, as in Punica's SGMV (arXiv 2310.18547); a place is a row's place in that
order.

What bounds these is how many loads follow on each other, so none is longer than place, rank, matrix, and matrices are
on their way before the kernel in front has ended (nothing but torch's copies writes them). Splits follow from sizes
alone, so a row's sums don't depend on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.triton_kernels.common import dot, next_power_of_2, start, wait

NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)


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
    BESIDE: tl.constexpr,  # the kernel in front is a product that started late
    PDL: tl.constexpr,
):
    """Grid (ceil(T / PLACES), L / CHUNK, S): one split's share of x A^T for some places and lanes."""
    start(PDL)
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
    if not BESIDE:
        wait(PDL)
    total = tl.zeros([PLACES, CHUNK, BLOCK_K // 8], tl.float32)  # each of what one thread loads at once
    at, has_rank = x + (rows * x_row)[:, None], (rank > 0)[:, None]
    for _ in range(split * BLOCK_K, SIZE, SPLITS * BLOCK_K):
        # Past the first cache, which may hold what stood there before: only waiting would empty it.
        values = tl.load(at + columns[None, :], has_rank & (columns < SIZE)[None, :], 0.0, cache_modifier=".cg")
        product = block.to(tl.float32) * values.to(tl.float32)[:, None, :]
        total += tl.sum(product.reshape(PLACES, CHUNK, BLOCK_K // 8, 8), 3)
        columns += SPLITS * BLOCK_K
        block = tl.load(matrix + columns[None, None, :], wanted & (columns < SIZE)[None, None, :], 0.0)
    target = low + ((split * num_rows + places) * LANES)[:, None] + lanes[None, :]
    tl.store(target, tl.sum(total, 2), has_rank)
    if BESIDE:
        last = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) - 1
        program = (split * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        if program == last:
            wait(PDL)


@triton.jit
def rows_of_b(b, slot, rank, outputs, inside, b_slot, RANK: tl.constexpr):
    """B [places, outputs, RANK] of the slots' adapters; zeros where there is none."""
    at = b + ((slot - 1) * b_slot)[:, None, None] + (outputs * RANK)[None, :, None] + tl.arange(0, RANK)[None, None, :]
    return tl.load(at, (rank > 0)[:, None, None] & inside[None, :, None], 0.0)


@triton.jit
def sum_of(
    low, places, part, rank, num_rows,
    LANES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """fp32 [places, INNER]: the sum of the splits; zeros where there is no adapter, and beyond RANK."""
    split, inner = tl.arange(0, SPLITS_PAD), tl.arange(0, INNER)
    at = (split[:, None] * num_rows + places[None, :]) * LANES + part * RANK
    mask = ((split < SPLITS)[:, None] & (rank > 0)[None, :])[:, :, None] & (inner < RANK)[None, None, :]
    return tl.sum(tl.load(low + at[:, :, None] + inner[None, None, :], mask, 0.0), 0)


@triton.jit
def times(matrix, low):
    """[places, outputs]: low B^T."""
    return tl.sum(matrix.to(tl.float32) * low[:, None, :], 2)


@triton.jit
def part_of(
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
    start(PDL)
    places, block = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.program_id(1)
    slot = tl.load(slots + places, places < num_rows, 0).to(tl.int64)
    rows = tl.load(order + places, places < num_rows, 0).to(tl.int64)
    part, outputs, stop = part_of(block, START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    rank = tl.load(ranks + (slot - 1) * rank_slot + part, slot > 0, 0)
    matrix = rows_of_b(b, slot, rank, outputs, outputs < stop, b_slot, RANK)
    wait(PDL)
    at, mask = out + (rows * out_row)[:, None] + outputs[None, :], (rank > 0)[:, None] & (outputs < stop)[None, :]
    old = tl.load(at, mask, 0.0).to(tl.float32)
    added = times(matrix, sum_of(low, places, part, rank, num_rows, LANES, RANK, SPLITS, SPLITS_PAD, RANK))
    tl.store(at, (old + added).to(out.dtype.element_ty), mask)


@triton.jit
def _gate_and_up(
    b, ranks, slot, columns, b_slot, rank_slot, SIZE: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr
):
    """B of gate and of up [outputs, INNER] of the adapter in a slot; zeros where there is none, and beyond RANK."""
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, (slot > 0) & (slot < NO_SLOT), 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, (slot > 0) & (slot < NO_SLOT), 0)
    inner = tl.arange(0, INNER)[None, :]
    at = b + (slot - 1) * b_slot + (columns * RANK)[:, None] + inner
    inside = (columns < SIZE)[:, None] & (inner < RANK)
    of_gate = tl.load(at, (gate_rank > 0) & inside, 0.0)
    return of_gate, tl.load(at + SIZE * RANK, (up_rank > 0) & inside, 0.0)


@triton.jit
def _next_slot(slot, last):
    """The smallest above the last; NO_SLOT: there is none."""
    return tl.min(tl.where(slot > last, slot, NO_SLOT), 0)


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
    INNER: tl.constexpr,  # RANK, or what tl.dot takes at least
    TILE: tl.constexpr,  # places of a program
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / TILE), ceil(SIZE / BLOCK_N)): silu(gate + low B^T) * (up + low B^T), for rows without an adapter,
    too. Adapter after adapter of the tile's, the next one's matrices on their way, is multiplied by the low rows of all
    places, by tensor cores, and kept where it belongs: what a place gets doesn't depend on the others."""
    start(PDL)
    place, columns = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, mask = place < num_rows, (place < num_rows)[:, None] & (columns < SIZE)[None, :]
    slot = tl.load(slots + place, is_row, 0).to(tl.int64)
    rows = tl.load(order + place, is_row, 0).to(tl.int64)
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, slot > 0, 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, slot > 0, 0)
    current = _next_slot(slot, 0)
    of_gate, of_up = _gate_and_up(b, ranks, current, columns, b_slot, rank_slot, SIZE, RANK, INNER)
    wait(PDL)
    at = gate_up + (rows * row)[:, None] + (columns // GROUP * (2 * GROUP) + columns % GROUP)[None, :]
    gate, up = tl.load(at, mask, 0.0), tl.load(at + GROUP, mask, 0.0)
    gate_low = sum_of(low, place, 0, gate_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD, INNER).to(
        b.dtype.element_ty
    )
    up_low = sum_of(low, place, 1, up_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD, INNER).to(b.dtype.element_ty)
    gate_added, up_added = tl.zeros([BLOCK_N, TILE], tl.float32), tl.zeros([BLOCK_N, TILE], tl.float32)
    while current < NO_SLOT:
        following = _next_slot(slot, current)
        next_of_gate, next_of_up = _gate_and_up(b, ranks, following, columns, b_slot, rank_slot, SIZE, RANK, INNER)
        is_its = (slot == current)[None, :]
        gate_added = tl.where(is_its, dot(of_gate, tl.trans(gate_low)), gate_added)
        up_added = tl.where(is_its, dot(of_up, tl.trans(up_low)), up_added)
        current, of_gate, of_up = following, next_of_gate, next_of_up
    gate, up = gate.to(tl.float32) + tl.trans(gate_added), up.to(tl.float32) + tl.trans(up_added)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + (rows * SIZE)[:, None] + columns[None, :], activated.to(out.dtype.element_ty), mask)


def arguments_of(adapted: UnaddedProduct | None) -> tuple[tuple[torch.Tensor | None, ...], dict[str, int]]:
    """The tensors and constants of a kernel that adds low B^T itself, a program or more for each row."""
    if adapted is None:
        return (None,) * 5, {"RANK": 0, "SPLITS": 1, "SPLITS_PAD": 1, "B_SLOT": 0, "RANK_SLOT": 0}
    low, stack, rows = adapted.low, adapted.stack, adapted.rows
    splits, strides = low.shape[0], {"B_SLOT": stack.b.stride(0), "RANK_SLOT": stack.ranks.stride(0)}
    constants = {"RANK": stack.rank, "SPLITS": splits, "SPLITS_PAD": next_power_of_2(splits), **strides}
    return (low, stack.b, stack.ranks, rows.order, rows.slots), constants
