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
def _sum_of(low, places, part, has_rank, num_rows, LANES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """fp32 [places, RANK]: the sum of the splits, in their order; zeros where there is no adapter."""
    at = low + (places * LANES + part * RANK)[:, None] + tl.arange(0, RANK)[None, :]
    total = tl.load(at, has_rank[:, None], 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * num_rows * LANES, has_rank[:, None], 0.0)
    return total


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


@triton.jit
def _take_one_adapter(slots, first, stop):
    """Whether the places of a tile do; they stand sorted."""
    return tl.load(slots + first) == tl.load(slots + stop - 1)


@triton.jit
def _expand(
    low, b, ranks, order, slots, out, owners, places, end, part, outputs, stop, b_slot, rank_slot, out_row, num_rows,
    LANES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds what the adapters of `owners` (as many as `places`, or one for all) give to the places before `end`."""
    slot = tl.load(slots + owners, owners < end, 0).to(tl.int64)
    rows = tl.load(order + places, places < end, 0).to(tl.int64)
    rank = tl.load(ranks + (slot - 1) * rank_slot + part, slot > 0, 0)
    matrix = _rows_of_b(b, slot, rank, outputs, outputs < stop, b_slot, RANK)
    _wait(PDL)
    has_rank = (places < end) & (rank > 0)
    at, mask = out + (rows * out_row)[:, None] + outputs[None, :], has_rank[:, None] & (outputs < stop)[None, :]
    old = tl.load(at, mask, 0.0).to(tl.float32)
    added = _times(matrix, _sum_of(low, places, part, has_rank, num_rows, LANES, RANK, SPLITS))
    tl.store(at, (old + added).to(out.dtype.element_ty), mask)


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
    PLACES: tl.constexpr,
    TILE: tl.constexpr,  # a multiple of PLACES
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / TILE), blocks of outputs, TILE / PLACES): out += low B^T. No block crosses parts. Where a tile
    takes one adapter, the last of its programs does all of it, and reads the matrix once; the others, which the device
    starts before, are gone while the product runs."""
    _start(PDL)
    first, share = tl.program_id(0) * TILE, tl.program_id(2)
    end = tl.minimum(first + TILE, num_rows)
    part, outputs, stop = part_of(tl.program_id(1), START_1, START_2, SIZE, FIRST_1, FIRST_2, BLOCK_N)
    if _take_one_adapter(slots, first, end):
        if share == TILE // PLACES - 1:
            _expand(
                low, b, ranks, order, slots, out, first + tl.arange(0, 1), first + tl.arange(0, TILE), end, part,
                outputs, stop, b_slot, rank_slot, out_row, num_rows, LANES, RANK, SPLITS, PDL,
            )  # fmt: skip
    else:
        places = first + share * PLACES + tl.arange(0, PLACES)
        _expand(
            low, b, ranks, order, slots, out, places, places, end, part,
            outputs, stop, b_slot, rank_slot, out_row, num_rows, LANES, RANK, SPLITS, PDL,
        )  # fmt: skip


@triton.jit
def _expand_silu(
    low, b, ranks, order, slots, gate_up, out, owners, places, end, columns, b_slot, rank_slot, row, num_rows,
    SIZE: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores silu(gate + low B^T) * (up + low B^T) of some places and columns; `owners` as in `_expand`."""
    inside = columns < SIZE
    slot = tl.load(slots + owners, owners < end, 0).to(tl.int64)
    rows = tl.load(order + places, places < end, 0).to(tl.int64)
    gate_rank = tl.load(ranks + (slot - 1) * rank_slot, slot > 0, 0)
    up_rank = tl.load(ranks + (slot - 1) * rank_slot + 1, slot > 0, 0)
    of_gate = _rows_of_b(b, slot, gate_rank, columns, inside, b_slot, RANK)
    of_up = _rows_of_b(b, slot, up_rank, SIZE + columns, inside, b_slot, RANK)
    _wait(PDL)
    mask = (places < end)[:, None] & inside[None, :]
    at = gate_up + (rows * row)[:, None] + (columns // GROUP * (2 * GROUP) + columns % GROUP)[None, :]
    gate, up = tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + GROUP, mask, 0.0).to(tl.float32)
    gate_low = _sum_of(low, places, 0, (places < end) & (gate_rank > 0), num_rows, 2 * RANK, RANK, SPLITS)
    up_low = _sum_of(low, places, 1, (places < end) & (up_rank > 0), num_rows, 2 * RANK, RANK, SPLITS)
    gate += _times(of_gate, gate_low)
    activated = gate / (1.0 + tl.exp(-gate)) * (up + _times(of_up, up_low))
    tl.store(out + (rows * SIZE)[:, None] + columns[None, :], activated.to(out.dtype.element_ty), mask)


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
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / TILE), ceil(SIZE / BLOCK_N), TILE / PLACES): silu(gate + low B^T) * (up + low B^T), for rows
    without an adapter, too."""
    _start(PDL)
    first, share = tl.program_id(0) * TILE, tl.program_id(2)
    end, columns = tl.minimum(first + TILE, num_rows), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if _take_one_adapter(slots, first, end):
        if share == TILE // PLACES - 1:
            _expand_silu(
                low, b, ranks, order, slots, gate_up, out, first + tl.arange(0, 1), first + tl.arange(0, TILE), end,
                columns, b_slot, rank_slot, row, num_rows, SIZE, GROUP, RANK, SPLITS, PDL,
            )  # fmt: skip
    else:
        places = first + share * PLACES + tl.arange(0, PLACES)
        _expand_silu(
            low, b, ranks, order, slots, gate_up, out, places, places, end,
            columns, b_slot, rank_slot, row, num_rows, SIZE, GROUP, RANK, SPLITS, PDL,
        )  # fmt: skip
