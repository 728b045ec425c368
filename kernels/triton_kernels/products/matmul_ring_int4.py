"""y = x @ weight^T for some ten to some hundred rows over weights of 4 bits in groups on Hopper, in Gluon: one warp
loads, two warpgroups make numbers of 16 bits of 4 in their registers, and multiply.

M rows, N outputs, K inputs. As in matmul_ring.py the weight tile is the wide operand of wgmma, here from registers: a
lane finds what it multiplies in its own words (kernels/products/quantised_weight.py packs them so), and nothing is
exchanged. Scales multiply sums, never weights.

Programs do a tile each, or one of SPLITS parts of its inputs. The last part's program finishes the tile: it adds what
the others left in the workspace, in the order of K (matmul_stream.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.products import quantised_plans
from tandem.kernels.triton_kernels.products.matmul_quantised import EIGHT_BF16, EIGHT_FP16
from tandem.kernels.triton_kernels.products.matmul_ring import finish, make_barriers
from tandem.kernels.triton_kernels.products.matmul_stream import copy_in, leave, part_places, take

TILE_K: gl.constexpr = gl.constexpr(quantised_plans.INT4_TILE_K)
WORDS: gl.constexpr = gl.constexpr(quantised_plans.INT4_TILE_K // 8)  # of a row of a tile
WARPGROUPS: gl.constexpr = gl.constexpr(2)  # that multiply


@gluon.jit
def eight_numbers(words, zero, dtype: gl.constexpr):
    """The eight numbers of words, less their zero points: as in matmul_quantised.py."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            EIGHT_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, (zero + 0xC300) * 0x10001],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            True, 1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            EIGHT_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, (zero + 0x6400) * 0x10001],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True, 1,
        )  # fmt: skip


@gluon.jit
def unpack(words, zero, dtype: gl.constexpr, HEIGHT: gl.constexpr, layout: gl.constexpr):
    """[HEIGHT, TILE_K] in `dtype`, less the zero points [HEIGHT]; a lane has what is its own in `layout` already."""
    a, b, c, d, e, f, g, h = eight_numbers(words, zero.to(gl.int32)[:, None], dtype)
    low = gl.join(gl.join(a, b), gl.join(c, d))
    by_lane = gl.join(low, gl.join(gl.join(e, f), gl.join(g, h)))  # [rows, 4 b + t, h, s, p]
    by_lane = by_lane.reshape([HEIGHT, TILE_K // 32, 4, 2, 2, 2]).permute(0, 1, 4, 3, 2, 5)
    return gl.convert_layout(by_lane.reshape([HEIGHT, TILE_K]), layout, assert_trivial=True)


@gluon.jit
def share(k_tiles, lanes, SPLITS: gl.constexpr):
    """(tile, part, first step along K, steps, lane along M) of this program."""
    place = gl.program_id(0) // lanes
    part = place % SPLITS
    first = part * k_tiles // SPLITS
    return place // SPLITS, part, first, (part + 1) * k_tiles // SPLITS - first, gl.program_id(0) % lanes


@gluon.jit
def load_words(w_desc, w_ring, barrier, slot, tile, step, HEIGHT: gl.constexpr):
    """A step of a tile, in a piece for each multiplying warpgroup."""
    for group in gl.static_range(WARPGROUPS):
        place = [(tile * WARPGROUPS + group) * HEIGHT, step * WORDS]
        copy_in(w_desc, place, barrier, w_ring.index(slot * WARPGROUPS + group))


@gluon.jit
def load_tiles(
    w_desc, x_desc, w_ring, x_ring, ready, empty, k_tiles, lanes,
    HEIGHT: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """The loading warp; the first words are on their way already."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes * WARPGROUPS + x_desc.block_type.nbytes
    tile, _, first, count, lane = share(k_tiles, lanes, SPLITS)
    gdc_wait()
    early = gl.minimum(count, STAGES)
    for step in range(early):
        copy_in(x_desc, [lane * TILE_M, (first + step) * TILE_K], ready.index(step), x_ring.index(step))
    for step in range(early, count):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), (step // STAGES - 1) & 1)
        mbarrier.expect(ready.index(slot), BYTES)
        load_words(w_desc, w_ring, ready.index(slot), slot, tile, first + step, HEIGHT)
        copy_in(x_desc, [lane * TILE_M, (first + step) * TILE_K], ready.index(slot), x_ring.index(slot))


@gluon.jit
def multiply(
    w_ring, x_ring, ready, empty, y_desc, y_stages, scales, zeros, bias, workspace, size_n, size_m, k_tiles, lanes,
    s_row, WHICH: gl.constexpr, HEIGHT: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """One multiplying warpgroup: HEIGHT outputs."""
    dtype: gl.constexpr = x_ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    TALL: gl.constexpr = [] if HEIGHT == 64 else [[64, 0]]
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]] + TALL, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],  # noqa: RUF005
        [HEIGHT, WORDS],
    )  # fmt: skip
    tile, part, first, count, lane = share(k_tiles, lanes, SPLITS)
    first_n = (tile * WARPGROUPS + WHICH) * HEIGHT
    of_sums = first_n + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    of_words = first_n + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, words_layout))
    STEPS: gl.constexpr = GROUP // TILE_K  # that share scales
    mark = first // STEPS * (s_row * 8)
    scale, zero = gl.load(scales + mark + of_sums), gl.load(zeros + mark + of_words)
    total = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
    none = gl.zeros([HEIGHT, TILE_M], gl.float32, layout)
    for step in range(count):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        weights = unpack(w_ring.index(slot * WARPGROUPS + WHICH).load(words_layout), zero, dtype, HEIGHT, w_layout)
        product = warpgroup_mma(weights, x_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        counts = scale.to(gl.float32)
        mark = gl.minimum(first + step + 1, first + count - 1) // STEPS * (s_row * 8)
        scale, zero = gl.load(scales + mark + of_sums), gl.load(zeros + mark + of_words)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(slot))
        total += product * counts[:, None]
    if SPLITS > 1:
        # A part's program is `lanes` behind that of the part before; it waits for those in front of it alone.
        own = gl.program_id(0) * WARPGROUPS + WHICH
        if part < SPLITS - 1:
            leave(total, workspace, part_places(own, 0, TILE_M, HEIGHT, TILE_M, layout))
        else:
            for behind in range(SPLITS - 1, 0, -1):
                places = part_places(own - behind * lanes * WARPGROUPS, 0, TILE_M, HEIGHT, TILE_M, layout)
                total += take(workspace, places)
    if part == SPLITS - 1:
        finish(
            total, y_desc, y_stages.index(WHICH), bias, None, None, size_n, size_m, first_n, lane * TILE_M,
            TILE_M, HEIGHT, HAS_BIAS, SILU,
        )  # fmt: skip
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["size_n", "size_m", "k_tiles", "lanes", "s_row"])
def matmul_ring_int4_kernel(
    w_desc,  # int32 [N, K / 8], tiles [HEIGHT, WORDS]
    x_desc,  # [M, K] in bf16 or fp16, tiles [TILE_M, TILE_K]
    y_desc,  # [M, N] (N / 2 with SILU), tiles [TILE_M, HEIGHT (half of it with SILU)]
    scales,  # any float [G, N], strides (s_row * 8, 1)
    zeros,  # as scales: what is stored for 0
    bias,  # [N], any float
    workspace,  # int32 [grid, WARPGROUPS, HEIGHT, TILE_M], EMPTY; EMPTY again afterwards
    size_n,
    size_m,
    k_tiles,
    lanes,  # tiles along M
    s_row,
    HEIGHT: gl.constexpr,  # outputs of a warpgroup, 64 or 128; N is a multiple of a program's
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of TILE_K
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """Grid (tiles along N * SPLITS * lanes). The first words are fetched at once: before the warps take their roles,
    and while the preceding kernel may still run."""
    BYTES: gl.constexpr = w_desc.block_type.nbytes * WARPGROUPS + x_desc.block_type.nbytes
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES * WARPGROUPS, HEIGHT, WORDS], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TILE_M, TILE_K], x_desc.layout)
    y_tile: gl.constexpr = y_desc.block_type.shape
    y_stages = gl.allocate_shared_memory(y_desc.dtype, [WARPGROUPS, y_tile[0], y_tile[1]], y_desc.layout)
    ready, empty = make_barriers(STAGES, WARPGROUPS)
    tile, _, first, count, _ = share(k_tiles, lanes, SPLITS)
    for step in range(gl.minimum(count, STAGES)):
        mbarrier.expect(ready.index(step), BYTES)
        load_words(w_desc, w_ring, ready.index(step), step, tile, first + step, HEIGHT)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (multiply, (
                w_ring, x_ring, ready, empty, y_desc, y_stages, scales, zeros, bias, workspace, size_n, size_m,
                k_tiles, lanes, s_row,
                0, HEIGHT, TILE_M, STAGES, GROUP, SPLITS, HAS_BIAS, SILU,
            )),
            (multiply, (
                w_ring, x_ring, ready, empty, y_desc, y_stages, scales, zeros, bias, workspace, size_n, size_m,
                k_tiles, lanes, s_row,
                1, HEIGHT, TILE_M, STAGES, GROUP, SPLITS, HAS_BIAS, SILU,
            )),
            (load_tiles, (
                w_desc, x_desc, w_ring, x_ring, ready, empty, k_tiles, lanes,
                HEIGHT, TILE_M, STAGES, SPLITS,
            )),
        ],
        [4, 1], [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
