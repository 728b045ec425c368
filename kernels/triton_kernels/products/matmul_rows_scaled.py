"""y = x @ weight^T for one row in bf16 over weights with scales of groups on Hopper, in Gluon: without tensor cores.

As in matmul_rows.py a program has whole outputs and reads their weights in long contiguous pieces, the first before the
kernel in front has ended. A thread has 16 bytes of a row at once, inputs that share a scale. What bounds it beside
memory are instructions. Over 4 bits some two a weight: a thread's 32 activations become integers of 16 bits, as parts
of the largest of them, so that an instruction multiplies four numbers by the upper or the lower bytes of four
activations. That is off by 1/65,024 of the largest at most, far below what bf16 keeps.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST: gl.constexpr = gl.constexpr(0x0DA24260)  # 1e-30 as bits
SILU_GROUP: gl.constexpr = gl.constexpr(8)  # gate and up rows alternate in groups of 8


@gluon.jit
def largest(a, b, c, d):
    """The largest magnitudes of pairs in bf16, as bits of fp32; NaN is largest."""
    pairs = gl.inline_asm_elementwise(
        """{ .reg .b32 p, q;
        and.b32 p, $1, 0x7fff7fff;
        and.b32 q, $2, 0x7fff7fff;
        max.NaN.bf16x2 p, p, q;
        and.b32 q, $3, 0x7fff7fff;
        max.NaN.bf16x2 p, p, q;
        and.b32 q, $4, 0x7fff7fff;
        max.NaN.bf16x2 $0, p, q; }""",
        "=r,r,r,r,r", [a, b, c, d], gl.int32, True, 1,
    )  # fmt: skip
    return gl.maximum(pairs << 16, pairs & -65536)


@gluon.jit
def in_bytes(a, b, factor):
    """Pairs a and b in bf16 times `factor` as integers of 16 bits: their upper bytes, which count 256, and their lower
    ones, both signed, in the order of a's first, b's first, a's second, b's second."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, r, s, g;
        .reg .f32 f, m;
        mov.f32 m, 0f4B400000;
        shl.b32 p, $2, 16;
        shl.b32 q, $3, 16;
        and.b32 r, $2, 0xffff0000;
        and.b32 s, $3, 0xffff0000;
        mov.b32 f, p; fma.rn.f32 f, f, $4, m; mov.b32 p, f;
        mov.b32 f, q; fma.rn.f32 f, f, $4, m; mov.b32 q, f;
        mov.b32 f, r; fma.rn.f32 f, f, $4, m; mov.b32 r, f;
        mov.b32 f, s; fma.rn.f32 f, f, $4, m; mov.b32 s, f;
        prmt.b32 g, p, q, 0x0040;
        prmt.b32 $1, r, s, 0x0040;
        prmt.b32 $1, g, $1, 0x5410;
        add.s32 p, p, 128;
        add.s32 q, q, 128;
        add.s32 r, r, 128;
        add.s32 s, s, 128;
        prmt.b32 p, p, q, 0x0051;
        prmt.b32 r, r, s, 0x0051;
        prmt.b32 $0, p, r, 0x5410; }""",
        "=&r,=&r,r,r,f", [a, b, factor], (gl.int32, gl.int32), True, 1,
    )  # fmt: skip


@gluon.jit
def times(words, even_upper, odd_upper, even_lower, odd_lower):
    """Each word's eight numbers times the upper bytes, and times the lower ones: sums in int32."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 e, o, u, l;
        and.b32 e, $2, 0x0f0f0f0f;
        shr.u32 o, $2, 4;
        and.b32 o, o, 0x0f0f0f0f;
        dp4a.s32.s32 u, e, $3, 0;
        dp4a.s32.s32 l, e, $5, 0;
        dp4a.s32.s32 $0, o, $4, u;
        dp4a.s32.s32 $1, o, $6, l; }""",
        "=&r,=&r,r,r,r,r,r", [words, even_upper, odd_upper, even_lower, odd_lower], (gl.int32, gl.int32), True, 1,
    )  # fmt: skip


@gluon.jit
def weighted(words, a, b, c, d):
    """Sums [N, B] of four words' numbers times activations, whose pairs of inputs 0, 8, 16 and 24 onwards are a, b, c
    and d [B, 4], and sums of the activations, [1, B], both in fp32. Number 4 p + 2 s + h of a word is that of input
    16 s + 8 h + 2 t + p of its 32, t the word's place (kernels/products/quantised_weight.py)."""
    peak = gl.maximum(gl.max(largest(a, b, c, d), 1), LEAST).to(gl.float32, bitcast=True)
    unit = peak * (1.0 / 32512.0)  # the upper byte of 32,639 is 127
    factor = gl.convert_layout(1.0 / unit, gl.SliceLayout(1, a.type.layout))[:, None]
    even_upper, even_lower = in_bytes(a, c, factor)
    odd_upper, odd_lower = in_bytes(b, d, factor)
    upper, lower = times(
        words, even_upper[None, :, :], odd_upper[None, :, :], even_lower[None, :, :], odd_lower[None, :, :]
    )
    plain_upper, plain_lower = times(gl.full_like(a, 0x11111111), even_upper, odd_upper, even_lower, odd_lower)
    sums = (gl.sum(upper, 2) << 8) + gl.sum(lower, 2)
    plain = (gl.sum(plain_upper, 1) << 8) + gl.sum(plain_lower, 1)
    of_blocks: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    unit = gl.convert_layout(unit, of_blocks)[None, :]
    return sums.to(gl.float32) * unit, gl.convert_layout(plain.to(gl.float32), of_blocks)[None, :] * unit


@gluon.jit(do_not_specialize=["w_row", "s_row"])
def matmul_rows_scaled_kernel(
    x,  # bf16 [K]; of 4 bits int32 [K / 2], two numbers each
    weight,  # e4m3 [N, K] or int32 [N, K / 8], strides (w_row * 16 bytes, 1)
    scales,  # any float [G, N], strides (s_row * 8, 1)
    zeros,  # as scales: what is stored for 0; of 4 bits only
    bias,  # [N], any float
    y,  # bf16 [N], or [N / 2] with SILU
    w_row,
    s_row,
    TILE_N: gl.constexpr,  # outputs of a program; it divides N, and with SILU twice SILU_GROUP
    STEPS: gl.constexpr,  # K over what a program's threads have at once
    GROUP: gl.constexpr,  # inputs that share a scale, a multiple of 32
    BITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (N / TILE_N,); sums in fp32, one rounding."""
    TILE_B: gl.constexpr = 32 * num_warps  # blocks of inputs, one a thread
    INPUTS: gl.constexpr = 128 // BITS
    ITEMS: gl.constexpr = 4 if BITS == 4 else 16  # of 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([TILE_N, 1, ITEMS], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
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
    item = gl.arange(0, ITEMS, layout=gl.SliceLayout(0, x_layout))[None, :]
    block = gl.arange(0, TILE_B, layout=gl.SliceLayout(1, x_layout))[:, None]
    rows = gl.convert_layout(outputs, gl.SliceLayout(1, gl.SliceLayout(2, layout))).to(gl.int64) * (w_row * ITEMS)
    weights = weight + gl.expand_dims(rows[:, None], 2) + gl.expand_dims(block * ITEMS + item, 0)
    inputs = x + block * 16 + item
    group = gl.arange(0, TILE_B, layout=gl.SliceLayout(0, sums_layout)) * INPUTS

    gdc_launch_dependents()
    following = gl.load(weights, cache_modifier=".cg")
    gdc_wait()
    total = gl.zeros([TILE_N, TILE_B], gl.float32, sums_layout)
    for step in gl.static_range(STEPS):
        words = following
        if step + 1 < STEPS:
            following = gl.load(weights + (step + 1) * (TILE_B * ITEMS), cache_modifier=".cg")
        marks = (group + step * (TILE_B * INPUTS)) // GROUP * (s_row * 8)
        places = outputs[:, None] + marks[None, :]
        scale = gl.load(scales + places).to(gl.float32)
        here = inputs + step * (TILE_B * 16)
        if BITS == 4:
            zero = gl.load(zeros + places).to(gl.float32)
            sums, plain = weighted(words, gl.load(here), gl.load(here + 4), gl.load(here + 8), gl.load(here + 12))
            total += (sums - zero * plain) * scale
        else:
            values = gl.expand_dims(gl.load(here).to(gl.float32), 0)
            total += gl.sum(words.to(gl.float32) * values, 2) * scale
    result = gl.sum(total, 1)
    if SILU:
        gates, ups = result.reshape([2, HALF]).permute(1, 0).split()
        result = gates / (1.0 + gl.exp(-gates)) * ups
        index = gl.arange(0, HALF, layout=result.type.layout)
    elif HAS_BIAS:
        result += gl.load(bias + outputs).to(gl.float32)
    gl.store(y + first + index, result.to(y.dtype.element_ty))
