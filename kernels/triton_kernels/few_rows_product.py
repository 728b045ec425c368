"""y = x @ weight^T for one to eight rows on Hopper, in Gluon, with what lies between two products of a decoder layer.

x may be normalised: its scale is one number a row, so it is applied to the sums, and no pass over x comes first. The
result may be gated, or added to what stands in y. M rows, N outputs, K inputs.

A program has whole outputs, 16 at a time, so that nothing is exchanged. Its weights stream through a ring in shared
memory; the warps share each piece along K and multiply it on tensor cores, 16 outputs by 8 rows. The ring takes less
than half of a multiprocessor's memory: with programmatic dependent launch the next product's programs come to stand
beside these and fill their rings while x is still being made, so that memory is always busy. Successors start only
after that wait: when one runs, all kernels before this one are complete.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name changed after 3.6

GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8
TILE_N: gl.constexpr = gl.constexpr(16)
ROWS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def fetch(
    places, weight, ring, unit, count, first_tile, w_row,
    STEPS: gl.constexpr, STRIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Asks for the program's `unit`-th piece of weights; a group of its own even if there is none."""
    if unit < count:
        tile = weight + (first_tile + unit // STEPS).to(gl.int64) * (TILE_N * w_row)
        async_copy.async_copy_global_to_shared(ring.index(unit % STAGES), tile + unit % STEPS * STRIDE + places)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["size_y", "num_rows", "tiles"])
def few_rows_product_kernel(
    x,  # [M, K], strides (x_row, 1)
    weight,  # [N, K], strides (w_row, 1)
    y,  # [M, size_y], strides (y_row, 1): size_y is N, or N / 2 with SILU
    bias,  # [N], any float
    gain,  # [K], NORM: x is divided by its root mean square and multiplied with this
    size_y,
    x_row,
    w_row,
    y_row,
    num_rows,  # M, at most ROWS
    eps,
    tiles,  # N / TILE_N
    TILE_K: gl.constexpr,  # of a warp, in a piece
    STEPS: gl.constexpr,  # pieces of a tile: K / (TILE_K * num_warps)
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    NORM: gl.constexpr,
    ADD: gl.constexpr,  # y += instead of y =
    num_warps: gl.constexpr,
):
    """Grid (P,): program p has tiles [p * tiles / P, (p + 1) * tiles / P). Sums in fp32, one rounding."""
    STRIDE: gl.constexpr = num_warps * TILE_K
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1, 1], instr_shape=[1, 16, 8]
    )
    w_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    LANES: gl.constexpr = TILE_K // 8  # that copy a row's part
    copies: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [num_warps, 1, 1], [2, 1, 0])
    dtype: gl.constexpr = weight.dtype.element_ty

    w_warp = gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, copies)))
    w_index = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, copies)))
    w_column = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, copies)))
    places = gl.expand_dims(gl.expand_dims(w_warp * TILE_K, 1), 2) + gl.expand_dims(gl.expand_dims(w_column, 0), 1)
    places += gl.expand_dims(gl.expand_dims(w_index * w_row, 0), 2)
    program, programs = gl.program_id(0), gl.num_programs(0)
    first, last = program * tiles // programs, (program + 1) * tiles // programs
    count = (last - first) * STEPS
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    ring = gl.allocate_shared_memory(dtype, [STAGES, num_warps, TILE_N, TILE_K], ring_layout)
    for stage in gl.static_range(STAGES):
        fetch(places, weight, ring, stage, count, first, w_row, STEPS, STRIDE, STAGES)

    x_warp = gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))
    x_column = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))
    x_index = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))
    x_columns = gl.expand_dims(x_warp * TILE_K, 1) + gl.expand_dims(x_column, 0)
    x_rows = gl.expand_dims(gl.expand_dims(x_index, 0), 1)
    inputs = x + gl.expand_dims(x_columns, 2) + gl.minimum(x_rows, num_rows - 1) * x_row
    is_row = x_rows < num_rows
    if NORM:
        gains = gl.load(gain + x_columns)
    gdc_wait()
    gdc_launch_dependents()
    following = gl.load(inputs, mask=is_row, other=0.0)
    sums_layout: gl.constexpr = gl.SliceLayout(0, mma)
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums_layout))
    for tile in range(first, last):
        acc = gl.zeros([num_warps, TILE_N, ROWS], gl.float32, mma)
        outputs = tile * TILE_N + index
        if ADD:
            inside = (outputs < size_y)[:, None] & (row < num_rows)[None, :]
            before = gl.load(y + outputs[:, None] + (row * y_row)[None, :], mask=inside, other=0.0)
        if NORM:
            squares = gl.zeros([num_warps, ROWS], gl.float32, gl.SliceLayout(1, x_layout))
        for step in range(STEPS):
            unit = (tile - first) * STEPS + step
            values = following
            next_columns = (step + 1) % STEPS * STRIDE
            following = gl.load(inputs + next_columns, mask=is_row, other=0.0)
            if NORM:
                wide = values.to(gl.float32)
                squares += gl.sum(wide * wide, 1)
                values = (wide * gl.expand_dims(gains.to(gl.float32), 2)).to(dtype)
                gains = gl.load(gain + next_columns + x_columns)
            async_copy.wait_group(STAGES - 1)
            thread_barrier()
            acc = mma_v2(ring.index(unit % STAGES).load(w_layout), values, acc)
            thread_barrier()
            fetch(places, weight, ring, unit + STAGES, count, first, w_row, STEPS, STRIDE, STAGES)
        sums = gl.sum(acc, 0)
        if NORM:
            scale = gl.rsqrt(gl.sum(squares, 0) / (STRIDE * STEPS) + eps)
            sums *= gl.convert_layout(scale, gl.SliceLayout(0, sums_layout))[None, :]
        if HAS_BIAS:
            sums += gl.load(bias + outputs).to(gl.float32)[:, None]
        if ADD:
            sums += before.to(gl.float32)
        store_tile(sums, y, tile, size_y, y_row, num_rows, SILU)


@gluon.jit
def store_tile(sums, y, tile, size_y, y_row, num_rows, SILU: gl.constexpr):
    """sums [TILE_N, ROWS]; with SILU its rows are 8 of gate, then 8 of up."""
    if SILU:
        gates, ups = sums.reshape([2, GROUP, ROWS]).permute(1, 2, 0).split()
        result = gates / (1.0 + gl.exp(-gates)) * ups
    else:
        result = sums
    SIZE: gl.constexpr = result.shape[0]
    layout: gl.constexpr = result.type.layout
    outputs = tile * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    inside = (outputs < size_y)[:, None] & (row < num_rows)[None, :]
    gl.store(y + outputs[:, None] + (row * y_row)[None, :], result.to(y.dtype.element_ty), mask=inside)
