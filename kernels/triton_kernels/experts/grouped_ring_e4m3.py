"""Products of many rows in e4m3 with the matrices of their experts in e4m3 on Hopper, in Gluon.

As in grouped_ring.py, but that the tensor cores keep few bits of sums over e4m3: those of 128 inputs are scaled and
added up in fp32, so a warpgroup has half as many outputs. Of 16 rows of a tile 8 are gates and 8 their ups: both of a
pair lie in one lane.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.triton_kernels.experts.grouped_ring import WARPGROUPS, load_tiles, places_of, sigmoid, store_rows
from tandem.kernels.triton_kernels.products.matmul_ring import make_barriers

HEIGHT: gl.constexpr = gl.constexpr(64)  # rows of the matrix that a warpgroup multiplies with
TILE_K: gl.constexpr = gl.constexpr(128)


@gluon.jit
def multiply(
    w_ring, x_ring, ready, empty, y_stages, y, order, tiles, w_scales, x_scales, counts, num_tiles, tiles_n, k_tiles,
    num_outputs, up, y_row,
    WHICH: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup."""
    OUTPUTS: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
    y_stage = y_stages.index(WHICH)
    column = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, layout))
    row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    own_row = row // 16 * 8 + row % 8 + row % 16 // 8 * up if GATED else row
    none = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
    gdc_wait()
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = tiles + number // tiles_n * 4
        expert, first, num_rows = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
        if num_rows > 0:
            first_n = (number % tiles_n * WARPGROUPS + WHICH) * OUTPUTS
            places = places_of(None if GATED else order, first, num_rows, TILE_M, stored)
            place = first + gl.minimum(column, num_rows - 1)
            factor = gl.load(x_scales + place)
            if GATED:
                count = gl.load(counts + place)
            groups = k_tiles * TILE_K // GROUP if GROUP > 0 else 1
            marks = w_scales + expert.to(gl.int64) * (groups * num_outputs) + first_n + own_row
            next_scale = gl.load(marks)
            total = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
            for k_tile in range(k_tiles):
                slot = step % STAGES
                mbarrier.wait(ready.index(slot), step // STAGES & 1)
                w_tile = w_ring.index(slot * WARPGROUPS + WHICH)
                product = warpgroup_mma(w_tile, x_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
                scale = next_scale
                if GROUP > 0:
                    later = gl.minimum(k_tile + 1, k_tiles - 1) * TILE_K // GROUP
                    next_scale = gl.load(marks + later * num_outputs)
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(slot))
                total += product * scale[:, None]
                step += 1
            total *= factor[None, :]
            if GATED:
                gate, upper = total.reshape([HEIGHT // 16, 2, 8, TILE_M]).permute(0, 2, 3, 1).split()
                value = (gate * sigmoid(gate) * upper).reshape([OUTPUTS, TILE_M])
                value *= gl.convert_layout(count, gl.SliceLayout(0, value.type.layout))[None, :]
                store_rows(value, y_stage, y, places, num_rows, first_n, y_row, stored)
            else:
                store_rows(total, y_stage, y, places, num_rows, first_n, y_row, stored)


@gluon.jit(do_not_specialize=["num_tiles", "tiles_n", "k_tiles", "num_outputs", "up", "y_row"])
def grouped_ring_e4m3_kernel(
    w_desc,  # [X * N, K], tiles [HEIGHT (8 of GATED), TILE_K]
    x_desc,  # [P, K] in the order of `order`, tiles [TILE_M, TILE_K]
    y,  # GATED: [P, N / 2] in the order of `order`, else [P, N] by pair; strides (16 * y_row, 1)
    order,  # int32 [P]: pairs, expert by expert
    tiles,  # int32 [tiles along M, 4]: expert, first place in `order`, number of pairs (0: no tile), 0
    w_scales,  # fp32 [X, G, N] contiguous
    x_scales,  # fp32 [P] in the order of `order`
    counts,  # fp32 [P] in the order of `order`: what is gated is multiplied by it; of GATED
    num_tiles,  # along M and N
    tiles_n,
    k_tiles,
    num_outputs,  # rows of an expert's matrix
    up,  # GATED: rows of a matrix before up's first
    y_row,
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of TILE_K; 0: all
    GATED: gl.constexpr,
    y_layout: gl.constexpr,  # of what a warpgroup stores at once
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Grid (programs,)."""
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WARPGROUPS, HEIGHT, TILE_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    OUTPUTS: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    y_stages = gl.allocate_shared_memory(y.dtype.element_ty, [WARPGROUPS, TILE_M, OUTPUTS], y_layout)
    ready, empty = make_barriers(STAGES, WARPGROUPS)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (multiply, (
                w_ring, x_ring, ready, empty, y_stages, y, order, tiles, w_scales, x_scales, counts, num_tiles, tiles_n,
                k_tiles, num_outputs, up, y_row,
                0, TILE_M, STAGES, GROUP, GATED,
            )),
            (multiply, (
                w_ring, x_ring, ready, empty, y_stages, y, order, tiles, w_scales, x_scales, counts, num_tiles, tiles_n,
                k_tiles, num_outputs, up, y_row,
                1, TILE_M, STAGES, GROUP, GATED,
            )),
            (load_tiles, (
                w_desc, x_desc, w_ring, x_ring, ready, empty, tiles, num_tiles, tiles_n, k_tiles, num_outputs, up,
                HEIGHT, TILE_K, STAGES, GATED,
            )),
        ],
        [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
