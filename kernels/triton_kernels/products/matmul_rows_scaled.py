"""y = x @ weight^T for one row in bf16 over weights in e4m3 on Hopper, in Gluon: without tensor cores.

As in matmul_rows.py a program has whole outputs and reads their weights in long contiguous pieces, the first before the
kernel in front has ended. A thread has 16 bytes of a row at once, inputs that share a scale.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SILU_GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8


@gluon.jit(do_not_specialize=["w_row", "s_row"])
def matmul_rows_scaled_kernel(
    x,  # bf16 [K]
    weight,  # e4m3 [N, K], strides (w_row * 16, 1)
    scales,  # any float [G, N], strides (s_row * 8, 1)
    bias,  # [N], any float
    y,  # bf16 [N], or [N / 2] with SILU
    w_row,
    s_row,
    TILE_N: gl.constexpr,  # outputs of a program; it divides N, and with SILU twice SILU_GROUP
    STEPS: gl.constexpr,  # K over what a program's threads have at once
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 32
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (N / TILE_N,); sums in fp32, one rounding."""
    TILE_B: gl.constexpr = 32 * num_warps  # blocks of inputs, one a thread
    INPUTS: gl.constexpr = 16  # of a thread at once
    layout: gl.constexpr = gl.BlockedLayout([TILE_N, 1, INPUTS], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    x_layout: gl.constexpr = gl.SliceLayout(0, layout)
    sums_layout: gl.constexpr = gl.SliceLayout(2, layout)
    index = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, sums_layout))
    if SILU:
        HALF: gl.constexpr = TILE_N // 2
        first = gl.program_id(0) * HALF
        gate = first // SILU_GROUP * (2 * SILU_GROUP) + first % SILU_GROUP
        outputs = gate + index % HALF + index // HALF * SILU_GROUP
    else:
        first = gl.program_id(0) * TILE_N
        outputs = first + index
    item = gl.arange(0, INPUTS, layout=gl.SliceLayout(0, x_layout))[None, :]
    block = gl.arange(0, TILE_B, layout=gl.SliceLayout(1, x_layout))[:, None]
    rows = gl.convert_layout(outputs, gl.SliceLayout(1, gl.SliceLayout(2, layout))).to(gl.int64) * (w_row * INPUTS)
    weights = weight + gl.expand_dims(rows[:, None], 2) + gl.expand_dims(block * INPUTS + item, 0)
    inputs = x + block * INPUTS + item
    group = gl.arange(0, TILE_B, layout=gl.SliceLayout(0, sums_layout)) * INPUTS

    gdc_launch_dependents()
    following = gl.load(weights, cache_modifier=".cg")
    gdc_wait()
    total = gl.zeros([TILE_N, TILE_B], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        words = following
        if step + 1 < STEPS:
            following = gl.load(weights + (step + 1) * (TILE_B * INPUTS), cache_modifier=".cg")
        marks = (group + step * (TILE_B * INPUTS)) // GROUP * (s_row * 8)
        places = outputs[:, None] + marks[None, :]
        scale = gl.load(scales + places).to(gl.float32)
        values = gl.expand_dims(gl.load(inputs + step * (TILE_B * INPUTS)).to(gl.float32), 0)
        total += gl.sum(words.to(gl.float32) * values, 2) * scale
    result = gl.sum(total, 1)
    if SILU:
        gates, ups = result.reshape([2, HALF]).permute(1, 0).split()
        result = gates / (1.0 + gl.exp(-gates)) * ups
        index = gl.arange(0, HALF, layout=result.type.layout)
    elif HAS_BIAS:
        result += gl.load(bias + outputs).to(gl.float32)
    gl.store(y + first + index, result.to(y.dtype.element_ty))
