"""y = x @ weight^T for up to some hundred rows on Hopper, in Gluon: one warp loads, one to three warpgroups multiply.

M rows, N outputs, K inputs. As in matmul_stream.py the weight tile is the wide operand of wgmma, so that every weight
is read once; here a warp of its own keeps a ring of STAGES tiles full, across the ends of tiles, and each multiplying
warpgroup does HEIGHT = TILE_N / GROUPS outputs of the tile.

SPLITS says who does what. 1: whole tiles, dealt evenly. 0: all K steps of all tiles stand in one line that programs
share evenly; who has a tile's first step finishes it, with the sums that others left in the workspace. Two and more:
that many programs a tile, each a piece of K; all leave their sums in the workspace, and then each adds up and finishes
an equal part of the tile's rows, so that the exchange is spread as evenly as the product.

A word of the workspace is EMPTY until a sum stands there. Programs wait for each other, so there is at most one for
each multiprocessor then: all of them run as soon as what ran before has ended.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.matmul_stream import EMPTY, NAN, silu_mul

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6
copy_in = tma.async_copy_global_to_shared


@gluon.jit
def share(tiles_n, k_tiles, lanes, SPLITS: gl.constexpr):
    """(program of its lane, programs of a lane, first unit, units): a unit is one K step of one tile."""
    programs = gl.num_programs(0) // lanes
    program = programs - 1 - gl.program_id(0) // lanes  # later shares start earlier
    if SPLITS == 1:
        first = program * tiles_n // programs * k_tiles
        last = (program + 1) * tiles_n // programs * k_tiles
    else:
        first = program * (tiles_n * k_tiles) // programs
        last = (program + 1) * (tiles_n * k_tiles) // programs
    return program, programs, first, last - first


@gluon.jit
def load_tiles(
    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
    HEIGHT: gl.constexpr, TILE_M: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """The loading warp. Weights of the first steps come before the preceding kernel has ended, x only afterwards."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes * GROUPS + x_desc.block_type.nbytes
    _program, _programs, first, count = share(tiles_n, k_tiles, lanes, SPLITS)
    row = gl.program_id(0) % lanes * TILE_M
    early = gl.minimum(count, STAGES)
    for step in range(early):
        unit = first + step
        mbarrier.expect(ready.index(step), BYTES)
        for group in gl.static_range(GROUPS):
            place = [(unit // k_tiles * GROUPS + group) * HEIGHT, unit % k_tiles * TILE_K]
            copy_in(w_desc, place, ready.index(step), w_ring.index(step * GROUPS + group))
    gdc_wait()
    for step in range(early):
        copy_in(x_desc, [row, (first + step) % k_tiles * TILE_K], ready.index(step), x_ring.index(step))
    for step in range(early, count):
        slot = step % STAGES
        unit = first + step
        tile = unit // k_tiles
        column = unit % k_tiles * TILE_K
        mbarrier.wait(empty.index(slot), (step // STAGES - 1) & 1)
        mbarrier.expect(ready.index(slot), BYTES)
        for group in gl.static_range(GROUPS):
            place = [(tile * GROUPS + group) * HEIGHT, column]
            copy_in(w_desc, place, ready.index(slot), w_ring.index(slot * GROUPS + group))
        copy_in(x_desc, [row, column], ready.index(slot), x_ring.index(slot))


@gluon.jit
def places_of(slot, first_column, SIZE: gl.constexpr, HEIGHT: gl.constexpr, TILE_M: gl.constexpr, layout: gl.constexpr):
    """Where columns [first_column, + SIZE) of a warpgroup's sums lie in the workspace: [TILE_M / 8, HEIGHT, 8], so that
    a warp's words lie side by side. Columns of sums are rows of y."""
    rows = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    offsets = slot * (HEIGHT * TILE_M) + first_column * HEIGHT + columns // 8 * (HEIGHT * 8) + rows * 8 + columns % 8
    return gl.max_contiguous(gl.multiple_of(offsets, [1, 8]), [1, 8])


@gluon.jit
def leave(acc, words):
    bits = acc.to(gl.int32, bitcast=True)
    gl.store(words, gl.where(bits == EMPTY, NAN, bits))


@gluon.jit
def take(bits, words):
    """Waits for the sums that another program leaves, and empties their place. `bits` are a first look."""
    while gl.max(gl.max((bits == EMPTY).to(gl.int32), 1), 0) != 0:
        bits = gl.load(words, volatile=True)
    gl.store(words, gl.full_like(bits, EMPTY))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def put(
    acc, y_desc, y_stage, bias, size_n, first_n, row,
    SIZE: gl.constexpr, HEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """SIZE rows of y: bias, then SiLU times up, in fp32; rounded once and stored."""
    layout: gl.constexpr = acc.type.layout
    if HAS_BIAS:
        outputs = first_n + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
        acc += gl.load(bias + outputs, mask=outputs < size_n, other=0.0).to(gl.float32)[:, None]
    value = silu_mul(acc, HEIGHT, SIZE) if SILU else acc
    tma.store_wait(0)
    thread_barrier()
    y_stage.permute((1, 0)).store(value.to(y_desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(y_desc, [row, first_n // 2 if SILU else first_n], y_stage)


@gluon.jit
def finish(
    acc, workspace, others_from, others_to, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row,
    FIRST: gl.constexpr, SIZE: gl.constexpr, WHICH: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
    TILE_M: gl.constexpr, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """Columns [FIRST, FIRST + SIZE) of the sums, with what others left."""
    layout: gl.constexpr = acc.type.layout
    if SPLITS == 0:
        for other in range(others_from, others_to):
            slot = (other * lanes + lane) * GROUPS + WHICH
            words = workspace + places_of(slot, FIRST, SIZE, HEIGHT, TILE_M, layout)
            acc += take(gl.load(words, volatile=True), words)
    put(acc, y_desc, y_stage, bias, size_n, first_n, row + FIRST, SIZE, HEIGHT, HAS_BIAS, SILU)


@gluon.jit
def exchange(
    acc, workspace, program, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row,
    SPLITS: gl.constexpr, WHICH: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr, TILE_M: gl.constexpr,
    HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """All programs of a tile leave their sums; each adds up its part of the rows in the order of K, and finishes it."""
    SIZE: gl.constexpr = TILE_M // SPLITS
    part_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16]
    )
    layout: gl.constexpr = acc.type.layout
    mine = (program * lanes + lane) * GROUPS + WHICH
    leave(acc, workspace + places_of(mine, 0, TILE_M, HEIGHT, TILE_M, layout))
    part = program % SPLITS
    first_slot = ((program - part) * lanes + lane) * GROUPS + WHICH
    total = gl.zeros([HEIGHT, SIZE], gl.float32, part_layout)
    BATCH: gl.constexpr = SPLITS if HEIGHT * TILE_M < 128 * 128 else SPLITS // 2
    for batch in gl.static_range(SPLITS // BATCH):
        looks = ()
        for place in gl.static_range(BATCH):
            slot = first_slot + (batch * BATCH + place) * lanes * GROUPS
            words = workspace + places_of(slot, part * SIZE, SIZE, HEIGHT, TILE_M, part_layout)
            looks += (gl.load(words, volatile=True),)  # type: ignore[assignment]
        for place in gl.static_range(BATCH):
            slot = first_slot + (batch * BATCH + place) * lanes * GROUPS
            words = workspace + places_of(slot, part * SIZE, SIZE, HEIGHT, TILE_M, part_layout)
            total += take(looks[place], words)
    put(total, y_desc, y_stage, bias, size_n, first_n, row + part * SIZE, SIZE, HEIGHT, HAS_BIAS, SILU)


@gluon.jit
def multiply(
    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
    WHICH: gl.constexpr, HEIGHT: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    program, programs, first, count = share(tiles_n, k_tiles, lanes, SPLITS)
    lane = gl.program_id(0) % lanes
    row = lane * TILE_M
    y_stage = y_stages.index(WHICH)
    step = 0
    while step < count:
        begin = step
        tile = (first + begin) // k_tiles
        start = tile * k_tiles
        end = gl.minimum(count, start + k_tiles - first)
        first_n = (tile * GROUPS + WHICH) * HEIGHT
        acc = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
        while step < end:
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            w_tile = w_ring.index(slot * GROUPS + WHICH)
            acc = warpgroup_mma(w_tile, x_ring.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > begin)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        if SPLITS > 1:
            exchange(
                acc, workspace, program, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row, SPLITS, WHICH,
                GROUPS, HEIGHT, TILE_M, HAS_BIAS, SILU,
            )  # fmt: skip
        elif SPLITS == 0 and first + begin > start:
            slot = (program * lanes + lane) * GROUPS + WHICH
            leave(acc, workspace + places_of(slot, 0, TILE_M, HEIGHT, TILE_M, layout))
        else:
            others_to = program + 1
            if SPLITS == 0:  # whose share has the tile's last unit
                others_to = ((start + k_tiles) * programs - 1) // (tiles_n * k_tiles) + 1
            if PARTS == 1:
                finish(
                    acc, workspace, program + 1, others_to, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row, 0,
                    TILE_M, WHICH, GROUPS, HEIGHT, TILE_M, SPLITS, HAS_BIAS, SILU,
                )  # fmt: skip
            else:
                HALF: gl.constexpr = TILE_M // 2
                low, high = acc.reshape([HEIGHT, 2, HALF]).permute(0, 2, 1).split()
                finish(
                    low, workspace, program + 1, others_to, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row, 0,
                    HALF, WHICH, GROUPS, HEIGHT, TILE_M, SPLITS, HAS_BIAS, SILU,
                )  # fmt: skip
                finish(
                    high, workspace, program + 1, others_to, lane, lanes, y_desc, y_stage, bias, size_n, first_n, row,
                    HALF, HALF, WHICH, GROUPS, HEIGHT, TILE_M, SPLITS, HAS_BIAS, SILU,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["size_n", "tiles_n", "k_tiles", "lanes"])
def matmul_ring_kernel(
    w_desc,  # [N, K], tiles [HEIGHT, TILE_K]
    x_desc,  # [M, K], tiles [TILE_M, TILE_K]
    y_desc,  # [M, N] (N / 2 with SILU), tiles [rows stored at once, HEIGHT (half of it with SILU)]
    bias,  # [N], any float
    workspace,  # int32 [grid, GROUPS, HEIGHT * TILE_M], EMPTY; EMPTY again afterwards
    size_n,
    tiles_n,
    k_tiles,
    lanes,  # tiles along M; the grid is a multiple of it
    HEIGHT: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Grid (lanes * programs): lane l does rows [l * TILE_M, ...)."""
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, HEIGHT, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    y_tile: gl.constexpr = y_desc.block_type.shape
    y_stages = gl.allocate_shared_memory(dtype, [GROUPS, y_tile[0], y_tile[1]], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    0, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (load_tiles, (
                    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
                    HEIGHT, TILE_M, TILE_K, STAGES, GROUPS, SPLITS,
                )),
            ],
            [1], [LOADER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    0, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    1, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (load_tiles, (
                    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
                    HEIGHT, TILE_M, TILE_K, STAGES, GROUPS, SPLITS,
                )),
            ],
            [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    0, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    1, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, workspace, size_n, tiles_n, k_tiles, lanes,
                    2, HEIGHT, TILE_M, STAGES, GROUPS, SPLITS, HAS_BIAS, SILU, PARTS,
                )),
                (load_tiles, (
                    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
                    HEIGHT, TILE_M, TILE_K, STAGES, GROUPS, SPLITS,
                )),
            ],
            [4, 4, 1], [GROUP_REGISTERS, GROUP_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
