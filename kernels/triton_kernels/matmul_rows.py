"""y = x @ weight^T for one to four rows on Hopper, in Gluon: weights go to registers in long contiguous pieces.

A program has whole outputs, so nothing is split and nobody waits: what bounds it is reading the weights once. So what
lies between two products of a decoder layer is done in them: x may be normalised (its scale is one number a row, so it
is applied to the sums: no pass over x comes first) and the result may be added to what stands in y.

With programmatic dependent launch a program asks for its first weights before the kernel in front has ended, and the
first `wave` programs have the weights of `ahead` more programs each brought to L2: memory is busy while x is made.
Successors start only after that wait: when one runs, all kernels before this one are complete.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8


@gluon.jit
def weight_rows(program, index, TILE_N: gl.constexpr, SILU: gl.constexpr):
    """The `index`-th of a program's TILE_N weight rows; with SILU half of them are of gate, then the same of up."""
    if SILU:
        HALF: gl.constexpr = TILE_N // 2
        first = program * HALF
        return first // GROUP * (2 * GROUP) + first % GROUP + index % HALF + index // HALF * GROUP
    else:
        return program * TILE_N + index


@gluon.jit
def bring_to_l2(weight, w_row, wave, ahead, TILE_N: gl.constexpr, ROW_BYTES: gl.constexpr, SILU: gl.constexpr,
                num_warps: gl.constexpr):  # fmt: skip
    """The weights of programs id + wave, id + 2 * wave, ...: a thread asks for a row, nobody waits for it."""
    thread = gl.arange(0, 32 * num_warps, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    program = gl.program_id(0) + (thread // TILE_N + 1) * wave
    rows = weight_rows(program, thread % TILE_N, TILE_N, SILU)
    wanted = (gl.program_id(0) < wave) & (thread < ahead * TILE_N) & (program < gl.num_programs(0))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [weight + rows.to(gl.int64) * w_row, wanted.to(gl.int32), gl.full_like(rows, ROW_BYTES)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit(do_not_specialize=["size_y", "num_rows", "wave", "ahead"])
def matmul_rows_kernel(
    x,  # [ROWS, K], strides (x_row, 1)
    weight,  # [N, K], strides (w_row, 1)
    y,  # [ROWS, size_y], strides (y_row, 1): size_y is N, or N / 2 with SILU
    bias,  # [N], any float
    gain,  # [K], NORM: x is divided by its root mean square and multiplied with this
    size_y,
    x_row,
    w_row,
    y_row,
    num_rows,
    eps,
    wave,
    ahead,
    ROWS: gl.constexpr,  # rows computed: num_rows or more
    TILE_N: gl.constexpr,  # weight rows of a program; it divides N, and GROUP with SILU
    TILE_K: gl.constexpr,
    STEPS: gl.constexpr,  # K / TILE_K
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    NORM: gl.constexpr,
    ADD: gl.constexpr,  # y += instead of y =
    num_warps: gl.constexpr,
):
    """Grid (N / TILE_N,); sums in fp32, one rounding."""
    layout: gl.constexpr = gl.BlockedLayout([ROWS, TILE_N, 8], [1, 1, 32], [1, 1, num_warps], [2, 1, 0])
    sums_layout: gl.constexpr = gl.SliceLayout(2, layout)
    x_layout: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout))
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, sums_layout))
    w_index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    x_index = gl.arange(0, ROWS, layout=gl.SliceLayout(1, x_layout))
    w_columns = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    x_columns = gl.arange(0, TILE_K, layout=gl.SliceLayout(0, x_layout))
    w_index = weight_rows(gl.program_id(0), w_index, TILE_N, SILU)
    weights = weight + (w_index.to(gl.int64) * w_row)[:, None] + w_columns[None, :]
    inputs = x + (gl.minimum(x_index, num_rows - 1) * x_row)[:, None] + x_columns[None, :]

    following = gl.load(weights, cache_modifier=".cg")
    if NORM:
        following_gain = gl.load(gain + x_columns)
    bring_to_l2(weight, w_row, wave, ahead, TILE_N, 2 * TILE_K * STEPS, SILU, num_warps)
    gdc_wait()
    gdc_launch_dependents()
    first = gl.program_id(0) * (TILE_N // 2 if SILU else TILE_N)
    inside = (row < num_rows)[:, None] & (first + index < size_y)[None, :]
    places = y + (row * y_row)[:, None] + (first + index)[None, :]
    if ADD:
        before = gl.load(places, mask=inside, other=0.0)
    products = gl.zeros([ROWS, TILE_N, TILE_K], gl.float32, layout)
    squares = gl.zeros([ROWS, TILE_K], gl.float32, x_layout)
    for step in gl.static_range(STEPS):
        current = following
        if step + 1 < STEPS:
            following = gl.load(weights + (step + 1) * TILE_K, cache_modifier=".cg")
        values = gl.load(inputs + step * TILE_K).to(gl.float32)
        if NORM:
            squares += values * values
            values *= following_gain.to(gl.float32)[None, :]
            if step + 1 < STEPS:
                following_gain = gl.load(gain + (step + 1) * TILE_K + x_columns)
        products += gl.expand_dims(current.to(gl.float32), 0) * gl.expand_dims(values, 1)
    sums = gl.sum(products, 2)
    if NORM:
        scale = gl.rsqrt(gl.sum(squares, 1) / (TILE_K * STEPS) + eps)
        sums *= gl.convert_layout(scale, gl.SliceLayout(1, sums_layout))[:, None]
    if SILU:
        HALF: gl.constexpr = TILE_N // 2
        gates, ups = sums.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
        result = gates / (1.0 + gl.exp(-gates)) * ups
        out_layout: gl.constexpr = result.type.layout
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
        index = gl.arange(0, HALF, layout=gl.SliceLayout(0, out_layout))
        inside = (row < num_rows)[:, None] & (first + index < size_y)[None, :]
        places = y + (row * y_row)[:, None] + (first + index)[None, :]
    else:
        if HAS_BIAS:
            sums += gl.load(bias + first + index).to(gl.float32)[None, :]
        if ADD:
            sums += before.to(gl.float32)
        result = sums
    gl.store(places, result.to(y.dtype.element_ty), mask=inside)
