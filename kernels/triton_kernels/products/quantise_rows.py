"""Rows of activations in e4m3, each with a scale: a number each, or two, high + low / 16, which hold what bf16 does."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, overlap

LARGEST: tl.constexpr = tl.constexpr(448.0)
LEAST: tl.constexpr = tl.constexpr(2.0**-100)  # smaller ones count as such where scales are powers of two
EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)  # of fp32
LEAST_NORMAL: tl.constexpr = tl.constexpr(2.0**-6)
HALF: tl.constexpr = tl.constexpr(1 << 19)  # half of what 3 bits of mantissa leave of fp32's 23
GRID: tl.constexpr = tl.constexpr(1.5 * 2.0**14)  # fp32 numbers of this size are 2^-9 apart, as e4m3's subnormal ones
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # the least normal fp32


@triton.jit
def as_e4m3(numbers):
    """fp32 numbers below the format's largest, rounded to those that e4m3 has, halves to even. A conversion there and
    back would say so in one line, but on an H200 (Triton 3.6) what came back had lost the exponent's highest bit."""
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + (HALF - 1) + ((bits >> 20) & 1)) & -(2 * HALF)).to(tl.float32, bitcast=True)
    subnormal = (numbers + GRID) - GRID
    return tl.where(tl.abs(numbers) < LEAST_NORMAL, subnormal, normal)


@triton.jit(do_not_specialize=["x_row"])
def quantise_rows_kernel(
    x,  # [M, SIZE], strides (x_row * 8, 1)
    values,  # e4m3 [PARTS, M, SIZE]
    scales,  # fp32 [M]
    x_row,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    begin(PDL)
    numbers = tl.load(x + row * (x_row * 8) + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    into = values + row * SIZE + columns
    if PARTS == 1:
        scale = tl.maximum(largest / LARGEST, TINY)
        scaled = tl.minimum(tl.maximum(numbers / scale, -LARGEST), LARGEST)
        tl.store(into, scaled.to(tl.float8e4nv), mask=columns < SIZE)
    else:  # the largest becomes 128 to 256, so that what is left of any number, times 16, is in range
        exponent = tl.maximum(largest, LEAST).to(tl.int32, bitcast=True) & EXPONENT
        scale = exponent.to(tl.float32, bitcast=True) / 128
        scaled = numbers * (1 / scale)
        high = as_e4m3(scaled)
        low = as_e4m3((scaled - high) * 16).to(tl.float8e4nv)
        tl.store(into, high.to(tl.float8e4nv), mask=columns < SIZE)
        tl.store(into + tl.num_programs(0).to(tl.int64) * SIZE, low, mask=columns < SIZE)
    tl.store(scales + row, scale)


def quantise_rows_triton(x_MK: torch.Tensor, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [M, K], or [2, M, K] in two parts, and fp32 [M, 1]. Eager twin: products/quantised.py."""
    num_rows, size = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 else x_MK.contiguous()
    assert size % 8 == 0, f"rows of {size} numbers"
    shape = (num_rows, size) if parts == 1 else (parts, num_rows, size)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x_MK.device)
    padded = triton.next_power_of_2(size)
    quantise_rows_kernel[(num_rows,)](
        x_MK, values, scales, x_MK.stride(0) // 8, SIZE=size, PADDED=padded, PARTS=parts,
        num_warps=min(16, max(1, padded // 1024)), **overlap(x_MK.device),
    )  # fmt: skip
    return values, scales
