"""Words of eight numbers of 4 bits as the tensor cores' lanes take them in products of m16n8k16, in Gluon."""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem.kernels.triton_kernels.experts.stored import EIGHT_E2M1

# Of a word: numbers 0 and 2 of each half become the mantissa of a power of two, 1 and 3, 16 times as large, either
# that (fp16) or a subnormal number (bf16, whose mantissa is too short). One instruction each then takes off what was
# put on and the zero point ($9, $10). In bf16 a fourth of the number is left, which a sum's scale makes up for.
_EIGHT = """{{ .reg .b32 a, b, c, d, m, n, p, q, w;
            mov.b32 m, {low};
            mov.b32 n, {high};
            mov.b32 p, {low_factor};
            mov.b32 q, {high_factor};
            shr.b32 w, $8, 8;
            lop3.b32 a, $8, 0x000f000f, m, 0xea;
            lop3.b32 b, $8, 0x00f000f0, n, 0xea;
            lop3.b32 c, w, 0x000f000f, m, 0xea;
            lop3.b32 d, w, 0x00f000f0, n, 0xea;
            fma.rn.{type} a, a, p, $9;
            fma.rn.{type} b, b, q, $10;
            fma.rn.{type} c, c, p, $9;
            fma.rn.{type} d, d, q, $10;
            mov.b32 {{$0, $4}}, a;
            mov.b32 {{$1, $5}}, b;
            mov.b32 {{$2, $6}}, c;
            mov.b32 {{$3, $7}}, d; }}"""
EIGHT_BF16: gl.constexpr = gl.constexpr(
    _EIGHT.format(low="0x43004300", high="0", low_factor="0x3e803e80", high_factor="0x7f007f00", type="bf16x2")
)
EIGHT_FP16: gl.constexpr = gl.constexpr(
    _EIGHT.format(low="0x64006400", high="0x64006400", low_factor="0x3c003c00", high_factor="0x2c002c00", type="f16x2")
)


@gluon.jit
def twice(value, dtype: gl.constexpr):
    """A number in fp32 that `dtype` holds exactly, as its bits in both halves of int32."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,f", [value], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [value], gl.int32, True, 1)


@gluon.jit
def in_lanes(a, b, c, d, e, f, g, h, layout: gl.constexpr, ROWS: gl.constexpr):
    """[ROWS, 128] as the tensor cores take them, of the eight numbers of words [ROWS, 4, 4], number 4 p + 2 s + h."""
    low = gl.join(gl.join(a, b), gl.join(c, d))
    by_word = gl.join(low, gl.join(gl.join(e, f), gl.join(g, h))).reshape([ROWS, 4, 2, 2, 2, 2, 2])
    # [rows, t, upper bit of i, lower bit, h, s, p]: what a lane multiplies at once are neighbouring words' pairs.
    return gl.convert_layout(by_word.permute(0, 5, 4, 2, 3, 1, 6).reshape([ROWS, 128]), layout)


@gluon.jit
def integers(words, zero, dtype: gl.constexpr, layout: gl.constexpr, ROWS: gl.constexpr):
    """Words of integers less their zero points [ROWS]; in bf16 a fourth of that."""
    zeros: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
    zero = zero.to(gl.float32)
    if dtype == gl.bfloat16:
        low, high = twice(-32.0 - 0.25 * zero, dtype), twice(-0.25 * zero, dtype)
    else:
        low, high = twice(-1024.0 - zero, dtype), twice(-64.0 - zero, dtype)
    low = gl.expand_dims(gl.convert_layout(low, zeros)[:, None], 2)
    high = gl.expand_dims(gl.convert_layout(high, zeros)[:, None], 2)
    if dtype == gl.bfloat16:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            EIGHT_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low, high],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            True, 1,
        )  # fmt: skip
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            EIGHT_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, low, high],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            True, 1,
        )  # fmt: skip
    return in_lanes(a, b, c, d, e, f, g, h, layout, ROWS)


@gluon.jit
def e2m1(words, exponents, layout: gl.constexpr, ROWS: gl.constexpr):
    """Words of e2m1 times their powers of two, [ROWS, 4] of which are given by exponents that are by 127 too large."""
    factors = gl.expand_dims(((exponents.to(gl.int32) + 126) << 7) * 0x10001, 2)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        EIGHT_E2M1, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, factors],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True, 1,
    )  # fmt: skip
    return in_lanes(a, b, c, d, e, f, g, h, layout, ROWS)
