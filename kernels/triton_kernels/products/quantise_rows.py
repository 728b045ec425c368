"""Rows of activations in e4m3, each with a scale."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem.kernels.triton_kernels.common import begin, next_power_of_2, overlap

LARGEST: tl.constexpr = tl.constexpr(448.0)
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # the least normal fp32


@triton.jit
def in_e4m3(numbers):
    """A row in fp32 divided by its scale, so that its largest number is the format's, and the scale."""
    scale = tl.maximum(tl.max(tl.abs(numbers), 0) / LARGEST, TINY)
    return tl.minimum(tl.maximum(numbers / scale, -LARGEST), LARGEST).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["x_row"])
def quantise_rows_kernel(
    x,  # [M, SIZE], strides (x_row * 8, 1)
    values,  # e4m3 [M, SIZE]
    scales,  # fp32 [M]
    x_row,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    begin(PDL)
    numbers = tl.load(x + row * (x_row * 8) + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    rounded, scale = in_e4m3(numbers)
    tl.store(values + row * SIZE + columns, rounded, mask=columns < SIZE)
    tl.store(scales + row, scale)


def quantise_rows_triton(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [M, K] and fp32 [M, 1]. Eager twin: products/fused_ops.py."""
    num_rows, size = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 else x_MK.contiguous()
    assert size % 8 == 0, f"rows of {size} numbers"
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x_MK.device)
    padded = next_power_of_2(size)
    quantise_rows_kernel[(num_rows,)](
        x_MK, values, scales, x_MK.stride(0) // 8, SIZE=size, PADDED=padded,
        num_warps=min(16, max(1, padded // 1024)), **overlap(x_MK.device),
    )  # fmt: skip
    return values, scales
