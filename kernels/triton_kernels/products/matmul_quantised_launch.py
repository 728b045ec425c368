"""Launches matmul_quantised.py: constants and grid from a plan."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.products.quantised_plans import QuantisedPlan
from tandem.kernels.products.quantised_weight import QuantisedWeight
from tandem.kernels.triton_kernels.common import overlap
from tandem.kernels.triton_kernels.products.matmul_quantised import dequantise_kernel, matmul_quantised_kernel


def constants_of(
    plan: QuantisedPlan, group: int, bits: int, *, has_bias: bool = False, silu: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time constants and options for a plan."""
    return {
        "TILE_N": plan.tile_n, "TILE_M": plan.tile_m, "TILE_K": plan.tile_k, "GROUP": group, "BITS": bits,
        "SPLITS": plan.splits, "HAS_BIAS": has_bias, "SILU": silu, "STAGES": plan.stages,
        "PREFETCH": plan.prefetch, "ROUNDED": plan.rounded,
        "num_warps": plan.warps, **({"maxnreg": plan.registers} if plan.registers else {}),
    }  # fmt: skip


def launch(
    plan: QuantisedPlan,
    x_MK: torch.Tensor,
    weight: QuantisedWeight,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
    x_scales: torch.Tensor | None = None,
) -> None:
    """out = x @ weight^T (+ bias, or gated). Rows of x and of the weight start at multiples of 16 elements.
    By a plan that rounds x is e4m3, with `x_scales`, one a row."""
    (num_rows, num_inputs), (num_outputs, _) = x_MK.shape, weight.shape
    tiles = plan.tiles(num_rows, num_outputs)
    assert tiles <= len(arrivals), f"{tiles} tiles"
    assert num_inputs % plan.tile_k == 0 == weight.group % plan.tile_k, f"{plan} for {weight.shape}"
    assert num_outputs % plan.tile_n == 0, f"{plan} for {weight.shape}"
    assert x_MK.stride(0) % 16 == 0, "rows of x must start at multiples of 16"
    assert plan.rounded == (x_scales is not None), f"{plan}, but scales of rows are {x_scales}"
    size = plan.tile_n * plan.tile_m * (tiles * plan.splits if plan.splits > 1 else 0)
    sums = torch.empty(size, dtype=torch.float32, device=out.device) if size else out
    scales, values, has_bias = weight.scales, weight.words, bias_N is not None
    zeros = scales if weight.zeros is None else weight.zeros
    assert not weight.group or scales.stride() == zeros.stride(), "scales and zeros lie differently"
    x_scales, bias_N = scales if x_scales is None else x_scales, scales if bias_N is None else bias_N
    matmul_quantised_kernel[(tiles * plan.splits,)](
        x_MK, x_scales, values, scales, zeros, bias_N, out, sums, arrivals,
        num_rows, num_inputs // plan.tile_k, plan.lanes(num_rows),
        x_MK.stride(0) // 16, weight.values.stride(0) // 16, out.stride(0), scales.stride(0) // 8,
        **constants_of(plan, weight.group, weight.bits, has_bias=has_bias, silu=silu),
        **overlap(out.device),
    )  # fmt: skip


def dequantise(weight: QuantisedWeight, out: torch.Tensor, tile_k: int) -> None:
    """out [N, K] = the weight in its type. N is a multiple of 64, K and the group of `tile_k`."""
    num_outputs, num_inputs = weight.shape
    scales, values = weight.scales, weight.words
    zeros = scales if weight.zeros is None else weight.zeros
    dequantise_kernel[(num_outputs // 64, num_inputs // tile_k)](
        values, scales, zeros, out, weight.values.stride(0) // 16, scales.stride(0) // 8, out.stride(0) // 16,
        TILE_N=64, TILE_K=tile_k, GROUP=weight.group, BITS=weight.bits, num_warps=4, **overlap(out.device),
    )  # fmt: skip
