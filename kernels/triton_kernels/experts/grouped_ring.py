"""Products of many rows with the matrices of their experts in 16 bits on Hopper, in Gluon: one warp loads, two
warpgroups multiply (as matmul_ring.py).

P pairs of a token and an expert, X experts, K inputs, N outputs. A tile is up to TILE_M pairs of one expert (sort.py
cuts them) and 256 of its outputs, or 128 gates and their ups, of which a warpgroup has half. Programs, one a
multiprocessor, take every so-many-th tile and keep their ring full across tiles' ends. Rows of x lie in the order of
experts, so that a tile's are loaded as one piece; what lies behind them are others', whose sums aren't stored.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.common import begin
from tandem.kernels.triton_kernels.products.matmul_ring import copy_in, make_barriers, thread_barrier

HEIGHT: gl.constexpr = gl.constexpr(128)  # rows of the matrix that a warpgroup multiplies with
BOX: gl.constexpr = gl.constexpr(64)  # that are loaded at once
WARPGROUPS: gl.constexpr = gl.constexpr(2)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "top_k", "x_row"])
def gather_rows_kernel(
    x,  # [T, SIZE], strides (16 * x_row, 1)
    order,  # int32 [P]: pairs, expert by expert; anything behind those whose experts are here
    counts,  # fp32 [P]
    x_scales,  # fp32 [T], where HAS_SCALES
    y,  # [P, SIZE] contiguous: the rows of the pairs' tokens
    own_counts,  # fp32 [P]: the counts of the pairs
    own_scales,  # fp32 [P]: the scales of the pairs' tokens, where HAS_SCALES
    num_tokens,
    num_pairs,
    top_k,
    x_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(P / ROWS),)."""
    begin(PDL)
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = place < num_pairs
    pair = tl.minimum(tl.maximum(tl.load(order + place, mask=is_row, other=0), 0), num_pairs - 1)
    token = tl.minimum(pair // top_k, num_tokens - 1).to(tl.int64)
    tl.store(own_counts + place, tl.load(counts + pair), mask=is_row)
    if HAS_SCALES:
        tl.store(own_scales + place, tl.load(x_scales + token), mask=is_row)
    for first in tl.static_range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = is_row[:, None] & (columns < SIZE)[None, :]
        row = tl.load(x + token[:, None] * (x_row * 16) + columns[None, :], mask=inside)
        tl.store(y + place[:, None] * SIZE + columns[None, :], row, mask=inside)


@gluon.jit
def load_tiles(
    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles, num_tiles, tiles_n, k_tiles, num_outputs, up,
    HEIGHT: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The loading warp. A warpgroup's HEIGHT rows are loaded in boxes; of GATED boxes of gates and of ups take
    turns."""
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    BOXES: gl.constexpr = HEIGHT // BOX
    BYTES: gl.constexpr = BOXES * WARPGROUPS * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    OUTPUTS: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT  # of a warpgroup
    gdc_wait()
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = tiles + number // tiles_n * 4
        expert, first, num_rows = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
        if num_rows > 0:
            row = expert * num_outputs + number % tiles_n * (WARPGROUPS * OUTPUTS)
            for k_tile in range(k_tiles):
                slot = step % STAGES
                barrier, column = ready.index(slot), k_tile * TILE_K
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(barrier, BYTES)
                for group in gl.static_range(WARPGROUPS):
                    for box in gl.static_range(BOXES):
                        own = row + group * OUTPUTS + (box // 2 * BOX + box % 2 * up if GATED else box * BOX)
                        w_tile = w_ring.index(slot * WARPGROUPS + group).slice(box * BOX, BOX, dim=0)
                        copy_in(w_desc, [own, column], barrier, w_tile)
                copy_in(x_desc, [first, column], barrier, x_ring.index(slot))
                step += 1


@gluon.jit
def places_of(order, first, num_rows, ROWS: gl.constexpr, layout: gl.constexpr):
    """Where rows of a tile are stored: from `first` on, or (there's an order) the pairs that stand there in it."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    place = first + gl.minimum(rows, gl.maximum(num_rows, 1) - 1)
    return place if order is None else gl.load(order + place)


@gluon.jit
def store_rows(value, y_stage, y, places, num_rows, first_n, y_row, layout: gl.constexpr):
    """Puts [outputs, rows] into rows of y."""
    thread_barrier()
    y_stage.permute((1, 0)).store(value.to(y.dtype.element_ty))
    thread_barrier()
    columns = first_n + gl.arange(0, value.shape[0], layout=gl.SliceLayout(0, layout))
    rows = gl.arange(0, value.shape[1], layout=gl.SliceLayout(1, layout))
    into = y + places.to(gl.int64)[:, None] * (y_row * 16) + gl.max_contiguous(columns, [8])[None, :]
    gl.store(into, y_stage.load(layout), mask=(rows < num_rows)[:, None] & (columns >= 0)[None, :])


@gluon.jit
def sigmoid(value):
    """1 / (1 + exp(-value)) in five instructions, off by some 2^-22: a division takes three times as many, and nothing
    is multiplied meanwhile."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 e;
        mul.ftz.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.ftz.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e; }""",
        "=f,f", [value], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def multiply(
    w_ring, x_ring, ready, empty, y_stages, y, order, tiles, counts, num_tiles, tiles_n, k_tiles, y_row,
    WHICH: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup. What the end of a tile needs is asked for before its products begin."""
    OUTPUTS: gl.constexpr = BOX if GATED else HEIGHT
    HALF: gl.constexpr = TILE_M if GATED else TILE_M // 2  # rows stored at once
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
    y_stage = y_stages.index(WHICH)
    column = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, layout))
    gdc_wait()
    step = 0
    following = tiles + gl.program_id(0) // tiles_n * 4
    next_first, next_rows = gl.load(following + 1), gl.load(following + 2)
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first, num_rows = next_first, next_rows
        following = tiles + gl.minimum(number + gl.num_programs(0), num_tiles - 1) // tiles_n * 4
        next_first, next_rows = gl.load(following + 1), gl.load(following + 2)
        if num_rows > 0:
            if GATED:
                places = places_of(None, first, num_rows, HALF, stored)
                count = gl.load(counts + first + gl.minimum(column, num_rows - 1))
            else:
                places = places_of(order, first, num_rows, HALF, stored)
                more_places = places_of(order, first + HALF, num_rows - HALF, HALF, stored)
            total = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
            for k_tile in range(k_tiles):
                slot = step % STAGES
                mbarrier.wait(ready.index(slot), step // STAGES & 1)
                w_tile = w_ring.index(slot * WARPGROUPS + WHICH)
                total = warpgroup_mma(w_tile, x_ring.index(slot).permute((1, 0)), total, is_async=True)
                total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k_tile > 0)
                step += 1
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            first_n = (number % tiles_n * WARPGROUPS + WHICH) * OUTPUTS
            if GATED:
                gate, upper = total.reshape([2, BOX, TILE_M]).permute(1, 2, 0).split()
                own_count = gl.convert_layout(count, gl.SliceLayout(0, gate.type.layout))
                value = gate * sigmoid(gate) * (upper * own_count[None, :])
                store_rows(value, y_stage, y, places, num_rows, first_n, y_row, stored)
            else:
                low, high = total.reshape([HEIGHT, 2, HALF]).permute(0, 2, 1).split()
                store_rows(low, y_stage, y, places, num_rows, first_n, y_row, stored)
                if num_rows > HALF:
                    store_rows(high, y_stage, y, more_places, num_rows - HALF, first_n, y_row, stored)


@gluon.jit(do_not_specialize=["num_tiles", "tiles_n", "k_tiles", "num_outputs", "up", "y_row"])
def grouped_ring_kernel(
    w_desc,  # [X * N, K], tiles [BOX, TILE_K]
    x_desc,  # [P, K] in the order of `order`, tiles [TILE_M, TILE_K]
    y,  # GATED: [P, N / 2] in the order of `order`, else [P, N] by pair; strides (16 * y_row, 1)
    order,  # int32 [P]: pairs, expert by expert
    tiles,  # int32 [tiles along M, 4]: expert, first place in `order`, number of pairs (0: no tile), 0
    counts,  # fp32 [P] in the order of `order`: what is gated is multiplied by it; of GATED
    num_tiles,  # along M and N
    tiles_n,
    k_tiles,
    num_outputs,  # rows of an expert's matrix
    up,  # GATED: rows of a matrix before up's first
    y_row,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    y_layout: gl.constexpr,  # of what a warpgroup stores at once
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Grid (programs,)."""
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, HEIGHT, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    Y_TILE: gl.constexpr = [TILE_M, BOX] if GATED else [TILE_M // 2, HEIGHT]
    y_stages = gl.allocate_shared_memory(y.dtype.element_ty, [WARPGROUPS] + Y_TILE, y_layout)  # noqa: RUF005
    ready, empty = make_barriers(STAGES, WARPGROUPS)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (multiply, (
                w_ring, x_ring, ready, empty, y_stages, y, order, tiles, counts, num_tiles, tiles_n, k_tiles, y_row,
                0, TILE_M, STAGES, GATED,
            )),
            (multiply, (
                w_ring, x_ring, ready, empty, y_stages, y, order, tiles, counts, num_tiles, tiles_n, k_tiles, y_row,
                1, TILE_M, STAGES, GATED,
            )),
            (load_tiles, (
                w_desc, x_desc, w_ring, x_ring, ready, empty, tiles, num_tiles, tiles_n, k_tiles, num_outputs, up,
                HEIGHT, TILE_K, STAGES, GATED,
            )),
        ],
        [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
