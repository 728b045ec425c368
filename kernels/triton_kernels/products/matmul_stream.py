"""y = x @ weight^T for few rows on Hopper, in Gluon: weights stream through shared memory, tiles are split evenly.

M rows, N outputs, K inputs. The weight tile is the wide operand of wgmma and x the narrow one, so that 1 to 256 rows
fit one tile. Work is cut as in "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication
on the GPU" (Osama et al., 2023): all K steps of all tiles stand in one line, which programs share evenly. Who has a
tile's first step finishes it: the others leave their sums in fp32 in a workspace, and it adds them in the order of K.
A word of the workspace is EMPTY until a sum stands there, so the sums need no flags and no fences. Programs wait only
for others with smaller ids, which started earlier, so the wait ends whatever else runs on the GPU.

Loads run STAGES steps ahead through the tensor memory accelerator. With programmatic dependent launch the first
weights are fetched while the preceding kernel still runs; nothing else is touched before that kernel has finished.
With LATE the next kernel starts only after that: it may read x at once, and runs beside this one.
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

from tandem.kernels.products import matmul_plans

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6
copy_in = tma.async_copy_global_to_shared

EMPTY: gl.constexpr = gl.constexpr(matmul_plans.EMPTY)
NAN: gl.constexpr = gl.constexpr(0x7FFFFFFF)
GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8: both halves meet in one thread


@gluon.jit
def share_start(program, units, tiles_n, programs, lead):
    """The start of a program's share, all of them even; where `lead` isn't zero, sums of a tile's later parts are on
    their way when its first part ends."""
    return program * units // programs + gl.where(program * tiles_n % programs != 0, lead, 0)


@gluon.jit
def refill(
    w_desc, x_desc, w_ring, x_ring, ready, used, first, count, row, k_tiles,
    TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads step used + STAGES into the slot of step `used`, which all warps have read."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    slot = used % STAGES
    unit = first + used + STAGES
    wanted = used + STAGES < count
    column = (unit % k_tiles) * TILE_K
    mbarrier.expect(ready.index(slot), BYTES, pred=wanted)
    copy_in(w_desc, [(unit // k_tiles) * TILE_N, column], ready.index(slot), w_ring.index(slot), pred=wanted)
    copy_in(x_desc, [row, column], ready.index(slot), x_ring.index(slot), pred=wanted)


@gluon.jit
def part_places(slot, part, size: gl.constexpr, TILE_N: gl.constexpr, TILE_M: gl.constexpr, layout: gl.constexpr):
    """Offsets in the workspace of columns [part * size, ...) of a program's unfinished tile."""
    rows = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, size, layout=gl.SliceLayout(0, layout))[None, :]
    return slot.to(gl.int64) * (TILE_N * TILE_M) + (rows * TILE_M + part * size + columns)


@gluon.jit
def leave(acc, workspace, places):
    bits = acc.to(gl.int32, bitcast=True)
    gl.store(workspace + places, gl.where(bits == EMPTY, NAN, bits))


@gluon.jit
def take(workspace, places):
    """Waits for the sums that another program leaves, and empties their place."""
    bits = gl.load(workspace + places, volatile=True)
    while gl.max(gl.max((bits == EMPTY).to(gl.int32), 1), 0) != 0:
        bits = gl.load(workspace + places, volatile=True)
    gl.store(workspace + places, gl.full_like(bits, EMPTY))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def silu_mul(acc, TILE_N: gl.constexpr, SIZE: gl.constexpr):
    """[TILE_N, SIZE] whose rows are 8 of gate, 8 of up, ... -> [TILE_N / 2, SIZE]."""
    pairs = acc.reshape([TILE_N // (2 * GROUP), 2, GROUP, SIZE]).permute(0, 2, 3, 1)
    gate, up = pairs.split()
    activated = gate / (1.0 + gl.exp(-gate)) * up
    return activated.reshape([TILE_N // 2, SIZE])


@gluon.jit
def fetch_scales(w_scales, first_n, size_n):
    """Has the cache ask for the scales of 1,024 outputs from here on, for those that sums will wait for: of one warp,
    lines of 128 bytes."""
    if w_scales is not None:
        line = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        places = w_scales + gl.minimum(first_n + line * 32, size_n - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(gl.int64)], gl.int32, False, 1
        )


@gluon.jit
def scales_of(
    w_scales, x_scales, size_n, size_m, first_n, row, HEIGHT: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr
):
    """What sums over numbers of e4m3 count, [HEIGHT, SIZE]: an output's scale times a row's."""
    outputs = first_n + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    rows = row + gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    of_outputs = gl.load(w_scales + outputs, mask=outputs < size_n, other=0.0)
    return of_outputs[:, None] * gl.load(x_scales + rows, mask=rows < size_m, other=0.0)[None, :]


@gluon.jit
def finish_part(
    acc, workspace, others_from, others_to, lane, lanes, y_desc, y_stage, bias, w_scales, x_scales, size_n, size_m,
    tile, row, part, SIZE: gl.constexpr, TILE_N: gl.constexpr, TILE_M: gl.constexpr, HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
):  # fmt: skip
    """SIZE rows of y: others' sums, scales, bias, then SiLU times up, in fp32; rounded once and stored."""
    layout: gl.constexpr = acc.type.layout
    for other in range(others_from, others_to):
        places = part_places(other * lanes + lane, part, SIZE, TILE_N, TILE_M, layout)
        acc += take(workspace, places)
    if w_scales is not None:
        first = row + part * SIZE
        acc *= scales_of(w_scales, x_scales, size_n, size_m, tile * TILE_N, first, TILE_N, SIZE, layout)
    if HAS_BIAS:
        outputs = tile * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))
        acc += gl.load(bias + outputs, mask=outputs < size_n, other=0.0).to(gl.float32)[:, None]
    value = silu_mul(acc, TILE_N, SIZE) if SILU else acc
    OUT_N: gl.constexpr = TILE_N // 2 if SILU else TILE_N
    place = [row + part * SIZE, tile * OUT_N]
    tma.store_wait(0)
    thread_barrier()
    y_stage.permute((1, 0)).store(value.to(y_desc.dtype))
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(y_desc, place, y_stage)


@gluon.jit(do_not_specialize=["size_n", "size_m", "tiles_n", "k_tiles", "lanes", "lead"])
def matmul_stream_kernel(
    w_desc,  # [N, K], tiles [TILE_N, TILE_K]; 16 bit, or e4m3
    x_desc,  # [M, K], tiles [TILE_M, TILE_K]
    y_desc,  # [M, N] (N / 2 with SILU), tiles [TILE_M / PARTS, TILE_N]
    bias,  # [N], any float
    w_scales,  # fp32 [N] over e4m3, else None
    x_scales,  # fp32 [M], likewise
    workspace,  # int32 [grid, TILE_N, TILE_M], EMPTY; EMPTY again afterwards
    size_n,
    size_m,
    tiles_n,
    k_tiles,
    lanes,  # tiles along M; the grid is a multiple of it
    lead,  # with a whole number of programs a tile: steps that who finishes it does beyond its even share
    TILE_N: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
    LATE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (lanes * programs): lane l does rows [l * TILE_M, ...), its programs share all tiles of N evenly."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, TILE_M, 256 // w_desc.dtype.primitive_bitwidth]
    )
    BYTES: gl.constexpr = w_desc.block_type.nbytes + x_desc.block_type.nbytes
    lane = gl.program_id(0) % lanes
    programs = gl.num_programs(0) // lanes
    program = programs - 1 - gl.program_id(0) // lanes  # later shares start earlier
    units = tiles_n * k_tiles
    first = share_start(program, units, tiles_n, programs, lead)
    count = share_start(program + 1, units, tiles_n, programs, lead) - first
    row = lane * TILE_M
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    y_stage = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(STAGES):
        mbarrier.init(ready.index(barrier), count=1)
    fence_async_shared()
    thread_barrier()
    fetch_scales(w_scales, first // k_tiles * TILE_N, size_n)
    early = gl.minimum(count, STAGES)
    for step in range(early):
        unit = first + step
        mbarrier.expect(ready.index(step), BYTES)
        place = [(unit // k_tiles) * TILE_N, (unit % k_tiles) * TILE_K]
        copy_in(w_desc, place, ready.index(step), w_ring.index(step))
    if not LATE:
        gdc_launch_dependents()
    gdc_wait()
    if LATE:
        gdc_launch_dependents()
    for step in range(early):
        copy_in(x_desc, [row, ((first + step) % k_tiles) * TILE_K], ready.index(step), x_ring.index(step))

    step = 0
    while step < count:
        begin = step
        tile = (first + begin) // k_tiles
        start = tile * k_tiles
        end = gl.minimum(count, start + k_tiles - first)
        acc = gl.zeros([TILE_N, TILE_M], gl.float32, layout)
        while step < end:
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            acc = warpgroup_mma(w_ring.index(slot), x_ring.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            thread_barrier()
            if step > begin:
                refill(
                    w_desc, x_desc, w_ring, x_ring, ready, step - 1, first, count, row, k_tiles, TILE_N, TILE_K, STAGES
                )
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        thread_barrier()
        refill(w_desc, x_desc, w_ring, x_ring, ready, step - 1, first, count, row, k_tiles, TILE_N, TILE_K, STAGES)
        if first + begin > start:
            leave(acc, workspace, part_places(program * lanes + lane, 0, TILE_M, TILE_N, TILE_M, layout))
        else:
            last = ((start + k_tiles) * programs - 1) // units  # whose share has the tile's last unit
            if PARTS == 1:
                finish_part(
                    acc, workspace, program + 1, last + 1, lane, lanes, y_desc, y_stage, bias, w_scales, x_scales,
                    size_n, size_m, tile, row, 0,
                    TILE_M, TILE_N, TILE_M, HAS_BIAS, SILU,
                )  # fmt: skip
            else:
                HALF: gl.constexpr = TILE_M // 2
                low, high = acc.reshape([TILE_N, 2, HALF]).permute(0, 2, 1).split()
                finish_part(
                    low, workspace, program + 1, last + 1, lane, lanes, y_desc, y_stage, bias, w_scales, x_scales,
                    size_n, size_m, tile, row, 0,
                    HALF, TILE_N, TILE_M, HAS_BIAS, SILU,
                )  # fmt: skip
                finish_part(
                    high, workspace, program + 1, last + 1, lane, lanes, y_desc, y_stage, bias, w_scales, x_scales,
                    size_n, size_m, tile, row, 1,
                    HALF, TILE_N, TILE_M, HAS_BIAS, SILU,
                )  # fmt: skip
    tma.store_wait(0)
