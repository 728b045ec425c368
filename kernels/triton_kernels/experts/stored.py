"""Quantised matrices of experts as the kernels read them: e4m3 with a scale an output, or one a group of inputs;
integers of 4 bits likewise, with zero points; e2m1 with a power of two for every 32 inputs (MXFP4: OCP Microscaling
Formats 1.0)."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tandem.kernels.experts.plans import inputs_of_a_scale
from tandem.kernels.experts.stacked import StackedWeight
from tandem.kernels.triton_kernels.common import INTERPRETED
from tandem.kernels.triton_kernels.products.matmul_quantised import in_order, widened


class Stored(NamedTuple):
    """What kernels take of a matrix. What it lacks, scales, zero points or a bias, is never read. Strides are in 16
    elements, or of quantised ones in 16 bytes."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor
    row: int
    expert: int
    bits: int = 0
    is_e2m1: bool = False
    group: int = 0
    has_bias: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor | StackedWeight) -> Stored:
        values = weight if isinstance(weight, torch.Tensor) else weight.values
        expert, row, _ = (stride // 16 for stride in values.stride())
        if isinstance(weight, torch.Tensor):
            return cls(values, values, values, values, row, expert)
        if weight.bits == 4:
            values = values.view(torch.int32)
        scales, bias = weight.scales, weight.bias
        zeros, has_bias = scales if weight.zeros is None else weight.zeros, bias is not None
        group = 0 if weight.is_e2m1 else inputs_of_a_scale(weight.group, weight.bits, weight.shape[2])
        bias = scales if bias is None else bias
        return cls(values, scales, zeros, bias, row, expert, weight.bits, weight.is_e2m1, group, has_bias)


# What `eight_e2m1` does of a word and of two powers of two.
EIGHT_E2M1: tl.constexpr = tl.constexpr(
    """{ .reg .b32 a, b, c, d, s, z;
    mov.b32 z, 0x80008000;
    shl.b32 a, $8, 6;
    shl.b32 b, $8, 2;
    shr.b32 c, $8, 2;
    shr.b32 d, $8, 6;
    and.b32 a, a, 0x01c001c0;
    and.b32 b, b, 0x01c001c0;
    and.b32 c, c, 0x01c001c0;
    and.b32 d, d, 0x01c001c0;
    shl.b32 s, $8, 12;
    lop3.b32 a, s, z, a, 0xea;
    shl.b32 s, $8, 8;
    lop3.b32 b, s, z, b, 0xea;
    shl.b32 s, $8, 4;
    lop3.b32 c, s, z, c, 0xea;
    lop3.b32 d, $8, z, d, 0xea;
    fma.rn.bf16x2 a, a, $9, z;
    fma.rn.bf16x2 b, b, $9, z;
    fma.rn.bf16x2 c, c, $9, z;
    fma.rn.bf16x2 d, d, $9, z;
    mov.b32 {$0, $4}, a;
    mov.b32 {$1, $5}, b;
    mov.b32 {$2, $6}, c;
    mov.b32 {$3, $7}, d; }"""
)


@triton.jit
def load_scales(marks, first, row, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """What a tile's weights are multiplied by: fp32 [rows], or [rows, groups] where a tile has several. `marks`: where
    the scales of the tile's outputs in the first group lie, `first`: the tile's first input, `row`: outputs of a
    group."""
    if GROUP > 0 and GROUP < TILE_K:
        groups = first // GROUP + tl.arange(0, TILE_K // GROUP)
        return tl.load(marks[:, None] + groups[None, :] * row)
    elif GROUP > 0:
        return tl.load(marks + first // GROUP * row)
    else:
        return tl.load(marks)


@triton.jit
def scaled(stored, scales, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """[TILE_N, TILE_K] in fp32, of e4m3."""
    wide = widened(stored, tl.float32)
    if GROUP > 0 and GROUP < TILE_K:
        grouped = wide.reshape(TILE_N, TILE_K // GROUP, GROUP) * scales[:, :, None]
        return grouped.reshape(TILE_N, TILE_K)
    else:
        return wide * scales[:, None]


@triton.jit
def e2m1_tile(words, exponents, DTYPE: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """[TILE_N, TILE_K] in DTYPE: exact, but that fp16 may be too narrow. `words`: int32 [TILE_N, TILE_K / 8], ordered
    as those of 4 bits (kernels/products/quantised_weight.py packs them): word 4 b + t has inputs
    32 b + 16 s + 8 h + 2 t + p, number 4 p + 2 s + h of its eight. `exponents`: uint8 [TILE_N, TILE_K / 32]."""
    shared = tl.broadcast_to(exponents.to(tl.int32)[:, :, None], (TILE_N, TILE_K // 32, 4))
    a, b, c, d, e, f, g, h = eight_e2m1(words, shared.reshape(TILE_N, TILE_K // 8), DTYPE)
    return in_order(a, b, c, d, e, f, g, h, TILE_N, TILE_K)


@triton.jit
def eight_e2m1(words, exponents, DTYPE: tl.constexpr):
    """int32 [...] of eight e2m1, and the exponent (by 127 too large, at most 128) of each word's -> eight [...] in
    DTYPE, number 4 p + j in bits 16 p + 4 j. In bf16 the three bits after the sign, as the last of an exponent and the
    first of a mantissa, are the number times 2^-126, subnormal ones included: one product with a power of two makes
    it right."""
    if INTERPRETED or tl.bfloat16 != DTYPE:
        factor = (exponents << 23).to(tl.float32, bitcast=True)
        return (
            _e2m1(words, factor, DTYPE), _e2m1(words >> 4, factor, DTYPE),
            _e2m1(words >> 8, factor, DTYPE), _e2m1(words >> 12, factor, DTYPE),
            _e2m1(words >> 16, factor, DTYPE), _e2m1(words >> 20, factor, DTYPE),
            _e2m1(words >> 24, factor, DTYPE), _e2m1(words >> 28, factor, DTYPE),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            EIGHT_E2M1,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, ((exponents + 126) << 7) * 0x10001],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True, 1,
        )  # fmt: skip


@triton.jit
def _e2m1(codes, factor, DTYPE: tl.constexpr):
    """The number in the last four bits, times the factor."""
    exponent, half = codes >> 1 & 3, codes & 1
    halves = tl.where(exponent == 0, half, (2 + half) << tl.maximum(exponent - 1, 0))
    signed = tl.where(codes & 8 != 0, -halves, halves)
    return (signed.to(tl.float32) * 0.5 * factor).to(DTYPE)
