"""Products with adapters of decode rows: kernels without tensor cores, places with matrices of their own.

T rows, K inputs, N outputs, R rank (padded), P parts (merged projections, each with an A of its own), L = P * R lanes,
S splits of K. Rows stand sorted by adapter, as in Punica's SGMV (arXiv 2310.18547); a place is a row's place in that
order.

What bounds these is how many loads follow on each other, so none is longer than place, rank, matrix, and matrices are
on their way before the kernel in front has ended (nothing but torch's copies writes them). Splits follow from sizes
alone, so a row's sums don't depend on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
    BESIDE: tl.constexpr,  # the kernel in front is a product that started late
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
    if not BESIDE:
        _wait(PDL)
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
            _wait(PDL)


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
    _start(PDL)
    places, block = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.program_id(1)
    slot = tl.load(slots + places, places < num_rows, 0).to(tl.int64)
    rows = tl.load(order + places, places < num_rows, 0).to(tl.int64)
    part, outputs, stop = part_of(block, START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    rank = tl.load(ranks + (slot - 1) * rank_slot + part, slot > 0, 0)
    matrix = _rows_of_b(b, slot, rank, outputs, outputs < stop, b_slot, RANK)
    _wait(PDL)
    at, mask = out + (rows * out_row)[:, None] + outputs[None, :], (rank > 0)[:, None] & (outputs < stop)[None, :]
    old = tl.load(at, mask, 0.0).to(tl.float32)
    added = _times(matrix, _sum_of(low, places, part, rank, num_rows, LANES, RANK, SPLITS, SPLITS_PAD))
    tl.store(at, (old + added).to(out.dtype.element_ty), mask)


@triton.jit
def _mask_of(places, stop, columns, SIZE: tl.constexpr):
    return (places < stop)[:, None] & (columns < SIZE)[None, :]


@triton.jit
def _load_gate_up(gate_up, rows, places, stop, columns, row, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Gate and up of some rows and columns."""
    mask = _mask_of(places, stop, columns, SIZE)
    at = gate_up + (rows * row)[:, None] + (columns // GROUP * (2 * GROUP) + columns % GROUP)[None, :]
    return tl.load(at, mask, 0.0), tl.load(at + GROUP, mask, 0.0)


@triton.jit
def _store_silu(out, gate, up, gate_added, up_added, rows, places, stop, columns, SIZE: tl.constexpr):
    """Stores silu(gate + added) * (up + added)."""
    mask = _mask_of(places, stop, columns, SIZE)
    gate, up = gate.to(tl.float32) + gate_added, up.to(tl.float32) + up_added
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + (rows * SIZE)[:, None] + columns[None, :], activated.to(out.dtype.element_ty), mask)


@triton.jit
def _gate_and_up(
    b, ranks, slots, places, stop, columns, b_slot, rank_slot, SIZE: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """B of gate and of up of the adapters of some places."""
    slot = tl.load(slots + places, places < stop, 0).to(tl.int64)
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, slot > 0, 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, slot > 0, 0)
    of_gate = _rows_of_b(b, slot, gate_rank, columns, columns < SIZE, b_slot, RANK)
    return of_gate, _rows_of_b(b, slot, up_rank, SIZE + columns, columns < SIZE, b_slot, RANK)


@triton.jit
def _some(low, index, PLACES: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr):
    """[PLACES, RANK] of [TILE, RANK]: those of number `index`."""
    by_number = low.reshape(TILE // PLACES, PLACES, RANK)
    return tl.sum(tl.where((tl.arange(0, TILE // PLACES) == index)[:, None, None], by_number, 0.0), 0)


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
    TILE: tl.constexpr,  # places of a program; a multiple of PLACES
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / TILE), ceil(SIZE / BLOCK_N)): silu(gate + low B^T) * (up + low B^T), for rows without an adapter,
    too. All places at once where they take one adapter, whose matrix is read once; else PLACES after PLACES, the next
    ones' matrices on their way."""
    _start(PDL)
    first, columns = tl.program_id(0) * TILE, tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    stop, tile = tl.minimum(first + TILE, num_rows), first + tl.arange(0, TILE)
    slot = tl.load(slots + tile, tile < stop, 0).to(tl.int64)
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, slot > 0, 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, slot > 0, 0)
    if tl.load(slots + first) == tl.load(slots + stop - 1):  # they stand sorted
        one = first + tl.arange(0, 1)
        gate_of_all, up_of_all = _gate_and_up(b, ranks, slots, one, stop, columns, b_slot, rank_slot, SIZE, RANK)
        rows = tl.load(order + tile, tile < stop, 0).to(tl.int64)
        _wait(PDL)
        gate, up = _load_gate_up(gate_up, rows, tile, stop, columns, row, SIZE, GROUP)
        gate_low = _sum_of(low, tile, 0, gate_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
        up_low = _sum_of(low, tile, 1, up_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
        gate_added, up_added = _times(gate_of_all, gate_low), _times(up_of_all, up_low)
        _store_silu(out, gate, up, gate_added, up_added, rows, tile, stop, columns, SIZE)
    else:
        places = first + tl.arange(0, PLACES)
        of_gate, of_up = _gate_and_up(b, ranks, slots, places, stop, columns, b_slot, rank_slot, SIZE, RANK)
        some = tl.load(order + places, places < stop, 0).to(tl.int64)
        _wait(PDL)
        some_gate, some_up = _load_gate_up(gate_up, some, places, stop, columns, row, SIZE, GROUP)
        low_of_gate = _sum_of(low, tile, 0, gate_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
        low_of_up = _sum_of(low, tile, 1, up_rank, num_rows, 2 * RANK, RANK, SPLITS, SPLITS_PAD)
        for index in range(TILE // PLACES):
            after = places + PLACES
            next_of_gate, next_of_up = _gate_and_up(
                b, ranks, slots, after, stop, columns, b_slot, rank_slot, SIZE, RANK
            )
            following = tl.load(order + after, after < stop, 0).to(tl.int64)
            next_gate, next_up = _load_gate_up(gate_up, following, after, stop, columns, row, SIZE, GROUP)
            added_to_gate = _times(of_gate, _some(low_of_gate, index, PLACES, TILE, RANK))
            added_to_up = _times(of_up, _some(low_of_up, index, PLACES, TILE, RANK))
            _store_silu(out, some_gate, some_up, added_to_gate, added_to_up, some, places, stop, columns, SIZE)
            of_gate, of_up, some_gate, some_up = next_of_gate, next_of_up, next_gate, next_up
            places, some = after, following
