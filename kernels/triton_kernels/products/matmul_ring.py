"""y = x @ weight^T for up to some hundred rows on Hopper, in Gluon: one warp loads, one or two warpgroups multiply.

M rows, N outputs, K inputs. As in matmul_stream.py the weight tile is the wide operand of wgmma, so that every weight
is read once; here a warp of its own keeps a ring of STAGES pairs of tiles full, across the ends of tiles, and each
multiplying warpgroup does HEIGHT = TILE_N / GROUPS outputs of a tile.

Programs do whole tiles, dealt evenly, one program a multiprocessor. Where that leaves multiprocessors idle, the next
product's programs fill their rings there meanwhile, which is worth more than sharing tiles and exchanging sums.
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

from tandem.kernels.triton_kernels.products.matmul_stream import fetch_scales, scales_of, silu_mul

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6
copy_in = tma.async_copy_global_to_shared


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Two for each slot of a ring: one says that it is full, the other that all READERS have read it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    thread_barrier()
    return ready, empty


@gluon.jit
def share(tiles_n, k_tiles, lanes):
    """(first unit, units) of this program: a unit is one K step of one tile."""
    programs = gl.num_programs(0) // lanes
    program = gl.program_id(0) // lanes
    first = program * tiles_n // programs
    last = (program + 1) * tiles_n // programs
    return first * k_tiles, (last - first) * k_tiles


@gluon.jit
def load_weights(
    w_desc, w_ring, barrier, slot, unit, k_tiles,
    HEIGHT: gl.constexpr, TILE_K: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A tile's step, in a piece for each multiplying warpgroup."""
    for group in gl.static_range(GROUPS):
        place = [(unit // k_tiles * GROUPS + group) * HEIGHT, unit % k_tiles * TILE_K]
        copy_in(w_desc, place, barrier, w_ring.index(slot * GROUPS + group))


@gluon.jit
def load_tiles(
    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
    HEIGHT: gl.constexpr, TILE_M: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """The loading warp; the first weights are on their way already. LATE as in matmul_stream.py."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes * GROUPS + x_desc.block_type.nbytes
    first, count = share(tiles_n, k_tiles, lanes)
    row = gl.program_id(0) % lanes * TILE_M
    gdc_wait()
    if LATE:
        gdc_launch_dependents()
    early = gl.minimum(count, STAGES)
    for step in range(early):
        copy_in(x_desc, [row, (first + step) % k_tiles * TILE_K], ready.index(step), x_ring.index(step))
    for step in range(early, count):
        slot = step % STAGES
        unit = first + step
        mbarrier.wait(empty.index(slot), (step // STAGES - 1) & 1)
        mbarrier.expect(ready.index(slot), BYTES)
        load_weights(w_desc, w_ring, ready.index(slot), slot, unit, k_tiles, HEIGHT, TILE_K, GROUPS)
        copy_in(x_desc, [row, unit % k_tiles * TILE_K], ready.index(slot), x_ring.index(slot))


@gluon.jit
def finish(
    acc, y_desc, y_stage, bias, w_scales, x_scales, size_n, size_m, first_n, row,
    SIZE: gl.constexpr, HEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """SIZE rows of y: scales, bias, then SiLU times up, in fp32; rounded once and stored."""
    layout: gl.constexpr = acc.type.layout
    if w_scales is not None:
        acc *= scales_of(w_scales, x_scales, size_n, size_m, first_n, row, HEIGHT, SIZE, layout)
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
def multiply(
    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, w_scales, x_scales, size_n, size_m, tiles_n, k_tiles, lanes,
    WHICH: gl.constexpr, HEIGHT: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr, SILU: gl.constexpr, PARTS: gl.constexpr, FP8_STEPS: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup. Of sums over e4m3 the tensor cores keep few bits, so after FP8_STEPS they are added to
    others in fp32."""
    INSTRUCTION_K: gl.constexpr = 256 // w_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, INSTRUCTION_K]
    )
    first, count = share(tiles_n, k_tiles, lanes)
    row = gl.program_id(0) % lanes * TILE_M
    y_stage = y_stages.index(WHICH)
    step = 0
    while step < count:
        begin = step
        tile = (first + begin) // k_tiles
        end = gl.minimum(count, (tile + 1) * k_tiles - first)
        first_n = (tile * GROUPS + WHICH) * HEIGHT
        acc = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
        if FP8_STEPS > 0:
            total = acc
        while step < end:
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            w_tile = w_ring.index(slot * GROUPS + WHICH)
            acc = warpgroup_mma(w_tile, x_ring.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > begin)
            step += 1
            if FP8_STEPS > 0:  # noqa: SIM102 (it is decided when the kernel is compiled)
                if (step - begin) % FP8_STEPS == 0:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    total += acc
                    acc = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if FP8_STEPS > 0:
            acc += total
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        if PARTS == 1:
            finish(
                acc, y_desc, y_stage, bias, w_scales, x_scales, size_n, size_m, first_n, row,
                TILE_M, HEIGHT, HAS_BIAS, SILU,
            )  # fmt: skip
        else:
            HALF: gl.constexpr = TILE_M // 2
            low, high = acc.reshape([HEIGHT, 2, HALF]).permute(0, 2, 1).split()
            finish(
                low, y_desc, y_stage, bias, w_scales, x_scales, size_n, size_m, first_n, row,
                HALF, HEIGHT, HAS_BIAS, SILU,
            )  # fmt: skip
            finish(
                high, y_desc, y_stage, bias, w_scales, x_scales, size_n, size_m, first_n, row + HALF,
                HALF, HEIGHT, HAS_BIAS, SILU,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["size_n", "size_m", "tiles_n", "k_tiles", "lanes"])
def matmul_ring_kernel(
    w_desc,  # [N, K], tiles [HEIGHT, TILE_K]; 16 bit, or e4m3
    x_desc,  # [M, K], tiles [TILE_M, TILE_K]
    y_desc,  # [M, N] (N / 2 with SILU), tiles [rows stored at once, HEIGHT (half of it with SILU)]
    bias,  # [N], any float
    w_scales,  # fp32 [N] over e4m3, else None
    x_scales,  # fp32 [M], likewise
    size_n,
    size_m,
    tiles_n,
    k_tiles,
    lanes,  # tiles along M; the grid is a multiple of it
    HEIGHT: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    PARTS: gl.constexpr,
    LATE: gl.constexpr,
    FP8_STEPS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Grid (lanes * programs): lane l does rows [l * TILE_M, ...). The first weights are fetched at once: before the
    warps take their roles, and while the preceding kernel may still run."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes * GROUPS + x_desc.block_type.nbytes
    dtype: gl.constexpr = w_desc.dtype
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, HEIGHT, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    y_tile: gl.constexpr = y_desc.block_type.shape
    y_stages = gl.allocate_shared_memory(y_desc.dtype, [GROUPS, y_tile[0], y_tile[1]], y_desc.layout)
    ready, empty = make_barriers(STAGES, GROUPS)
    first, count = share(tiles_n, k_tiles, lanes)
    for step in range(gl.minimum(count, STAGES)):
        mbarrier.expect(ready.index(step), BYTES)
        load_weights(w_desc, w_ring, ready.index(step), step, first + step, k_tiles, HEIGHT, TILE_K, GROUPS)
    if not LATE:
        gdc_launch_dependents()
    fetch_scales(w_scales, first // k_tiles * (GROUPS * HEIGHT), size_n)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, w_scales, x_scales, size_n, size_m, tiles_n,
                    k_tiles, lanes,
                    0, HEIGHT, TILE_M, STAGES, GROUPS, HAS_BIAS, SILU, PARTS, FP8_STEPS,
                )),
                (load_tiles, (
                    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
                    HEIGHT, TILE_M, TILE_K, STAGES, GROUPS, LATE,
                )),
            ],
            [1], [LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, w_scales, x_scales, size_n, size_m, tiles_n,
                    k_tiles, lanes,
                    0, HEIGHT, TILE_M, STAGES, GROUPS, HAS_BIAS, SILU, PARTS, FP8_STEPS,
                )),
                (multiply, (
                    w_ring, x_ring, ready, empty, y_desc, y_stages, bias, w_scales, x_scales, size_n, size_m, tiles_n,
                    k_tiles, lanes,
                    1, HEIGHT, TILE_M, STAGES, GROUPS, HAS_BIAS, SILU, PARTS, FP8_STEPS,
                )),
                (load_tiles, (
                    w_desc, x_desc, w_ring, x_ring, ready, empty, tiles_n, k_tiles, lanes,
                    HEIGHT, TILE_M, TILE_K, STAGES, GROUPS, LATE,
                )),
            ],
            [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
