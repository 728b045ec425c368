"""y = x @ weight^T for few rows on Hopper, in Gluon: weights stream through shared memory, tiles are split evenly.

M rows, N outputs, K inputs. The weight tile is the wide operand of wgmma and x the narrow one, so that 1 to 256 rows
fit one tile. Work is cut as in "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication
on the GPU" (Osama et al., 2023): all K steps of all tiles stand in one line, which programs share evenly; parts of a
tile meet in fp32 in a workspace, and the last program to arrive adds them in the order of K. The result doesn't depend
on who that is. One warp loads through the tensor memory accelerator; with programmatic dependent launch it
fetches weights while the preceding kernel still runs, and touches nothing else before that kernel has finished.
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

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6
GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8: both halves meet in one thread


@gluon.jit
def load_tiles(
    w_desc, x_desc, w_ring, x_ring, ready, empty, first, last, row, k_tiles,
    TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: units [first, last) in order, each a weight tile and an x tile of TILE_K columns."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    early = gl.minimum(last - first, STAGES)
    for step in range(early):
        unit = first + step
        mbarrier.expect(ready.index(step), BYTES)
        place = [(unit // k_tiles) * TILE_N, (unit % k_tiles) * TILE_K]
        tma.async_copy_global_to_shared(w_desc, place, ready.index(step), w_ring.index(step))
    gdc_wait()
    for step in range(early):
        column = ((first + step) % k_tiles) * TILE_K
        tma.async_copy_global_to_shared(x_desc, [row, column], ready.index(step), x_ring.index(step))
    gdc_launch_dependents()
    for step in range(STAGES, last - first):
        slot = step % STAGES
        unit = first + step
        column = (unit % k_tiles) * TILE_K
        mbarrier.wait(empty.index(slot), (step // STAGES - 1) & 1)
        mbarrier.expect(ready.index(slot), BYTES)
        tma.async_copy_global_to_shared(
            w_desc, [(unit // k_tiles) * TILE_N, column], ready.index(slot), w_ring.index(slot)
        )
        tma.async_copy_global_to_shared(x_desc, [row, column], ready.index(slot), x_ring.index(slot))


@gluon.jit
def owner_of(unit, units, programs):
    """The program whose share has `unit`; p's are units [p * units // programs, (p + 1) * units // programs)."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def meet(
    acc, partials, counters, tile, begin, program, lane, lanes, first, units, programs, k_tiles,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Leaves this program's part of a tile; -> (whether all parts are there, their sum in the order of K)."""
    rows = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, layout))[None, :]
    inside = rows * TILE_M + columns
    own = (program * lanes + lane) * 2 + (begin != first).to(gl.int32)
    gl.store(partials + own.to(gl.int64) * (TILE_N * TILE_M) + inside, acc)
    thread_barrier()
    start = tile * k_tiles
    from_program = owner_of(start, units, programs)
    to_program = owner_of(start + k_tiles - 1, units, programs)
    counter = counters + tile * lanes + lane
    is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == to_program - from_program
    total = acc
    if is_last:
        total = gl.zeros([TILE_N, TILE_M], gl.float32, layout)
        for other in range(from_program, to_program + 1):
            theirs = (other * lanes + lane) * 2 + (other * units // programs < start).to(gl.int32)
            total += gl.load(partials + theirs.to(gl.int64) * (TILE_N * TILE_M) + inside, cache_modifier=".cg")
        gl.store(counter, 0)
    return is_last, total


@gluon.jit
def silu_mul(acc, TILE_N: gl.constexpr, TILE_M: gl.constexpr):
    """[TILE_N, TILE_M] whose rows are 8 of gate, 8 of up, ... -> [TILE_N / 2, TILE_M]."""
    pairs = acc.reshape([TILE_N // (2 * GROUP), 2, GROUP, TILE_M]).permute(0, 2, 3, 1)
    gate, up = pairs.split()
    activated = gate / (1.0 + gl.exp(-gate)) * up
    return activated.reshape([TILE_N // 2, TILE_M])


@gluon.jit
def put(value, y_desc, y_stage, add_desc, add_ready, add_phase, row, column, HAS_ADDEND: gl.constexpr):
    """Adds the addend to value [columns, rows], rounds and stores it transposed; what lies outside is dropped."""
    tma.store_wait(0)
    thread_barrier()
    if HAS_ADDEND:
        mbarrier.expect(add_ready, add_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(add_desc, [row, column], add_ready, y_stage)
        mbarrier.wait(add_ready, add_phase)
        value += y_stage.permute((1, 0)).load(value.type.layout).to(gl.float32)
        thread_barrier()
    y_stage.permute((1, 0)).store(value.to(y_desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(y_desc, [row, column], y_stage)


@gluon.jit
def finish(
    acc, y_desc, y_stage, add_desc, add_ready, added, bias, size_n, tile, row,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ADDEND: gl.constexpr, SILU: gl.constexpr,
    PARTS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Bias, then SiLU times up or the addend, in fp32; one rounding; stored in PARTS pieces of TILE_M / PARTS rows."""
    if HAS_BIAS:
        rows = tile * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))
        acc += gl.load(bias + rows, mask=rows < size_n, other=0.0).to(gl.float32)[:, None]
    OUT_N: gl.constexpr = TILE_N // 2 if SILU else TILE_N
    value = silu_mul(acc, TILE_N, TILE_M) if SILU else acc
    column = tile * OUT_N
    if PARTS == 1:
        put(value, y_desc, y_stage, add_desc, add_ready, added & 1, row, column, HAS_ADDEND)
    else:
        low, high = value.reshape([OUT_N, 2, TILE_M // 2]).permute(0, 2, 1).split()
        put(low, y_desc, y_stage, add_desc, add_ready, 0, row, column, HAS_ADDEND)
        put(high, y_desc, y_stage, add_desc, add_ready, 1, row + TILE_M // 2, column, HAS_ADDEND)


@gluon.jit
def multiply_tiles(
    w_ring, x_ring, ready, empty, y_desc, y_stage, add_desc, add_ready, bias, partials, counters, size_n,
    first, last, program, lane, lanes, units, programs, row, k_tiles,
    TILE_N: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_ADDEND: gl.constexpr,
    SILU: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: units [first, last), one stretch of a tile after another."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE_M, 16]
    )
    gdc_wait()
    unit = first
    step = 0
    added = 0
    while unit < last:
        tile = unit // k_tiles
        begin = unit
        end = gl.minimum(last, (tile + 1) * k_tiles)
        acc = gl.zeros([TILE_N, TILE_M], gl.float32, layout)
        while unit < end:
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            acc = warpgroup_mma(w_ring.index(slot), x_ring.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=unit > begin)
            unit += 1
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        complete = end - begin == k_tiles
        if not complete:
            complete, acc = meet(
                acc, partials, counters, tile, begin, program, lane, lanes, first, units, programs, k_tiles,
                TILE_N, TILE_M, layout,
            )  # fmt: skip
        if complete:
            finish(
                acc, y_desc, y_stage, add_desc, add_ready, added, bias, size_n, tile, row,
                TILE_N, TILE_M, HAS_BIAS, HAS_ADDEND, SILU, PARTS, layout,
            )  # fmt: skip
            added += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["size_n", "tiles_n", "k_tiles", "lanes"])
def matmul_stream_kernel(
    w_desc,  # [N, K], tiles [TILE_N, TILE_K]
    x_desc,  # [M, K], tiles [TILE_M, TILE_K]
    y_desc,  # [M, N] (N / 2 with SILU), tiles [TILE_M / PARTS, TILE_N]
    add_desc,  # as y_desc; y_desc itself without HAS_ADDEND
    bias,  # [N], any float
    partials,  # fp32 [2 * grid, TILE_N, TILE_M]
    counters,  # int32 [tiles], zeros; zeros again afterwards
    size_n,
    tiles_n,
    k_tiles,
    lanes,  # tiles along M; the grid is a multiple of it
    TILE_N: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ADDEND: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (lanes * programs): lane l does rows [l * TILE_M, ...), its programs share all tiles of N evenly."""
    lane = gl.program_id(0) % lanes
    program = gl.program_id(0) // lanes
    programs = gl.num_programs(0) // lanes
    units = tiles_n * k_tiles
    first = program * units // programs
    last = (program + 1) * units // programs
    row = lane * TILE_M
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    y_stage = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    add_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(add_ready, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                w_ring, x_ring, ready, empty, y_desc, y_stage, add_desc, add_ready, bias, partials, counters, size_n,
                first, last, program, lane, lanes, units, programs, row, k_tiles,
                TILE_N, TILE_M, STAGES, HAS_BIAS, HAS_ADDEND, SILU, PARTS, num_warps,
            )),
            (load_tiles, (
                w_desc, x_desc, w_ring, x_ring, ready, empty, first, last, row, k_tiles, TILE_N, TILE_K, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
