"""Launches the Hopper products: descriptors, constants and grid from a plan."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.products.matmul_plans import MANY_STEPS, Plan, RingPlan, RowsPlan, StreamPlan
from tandem.kernels.products.quantised_plans import INT4_TILE_K, Int4RingPlan, Int4RowPlan
from tandem.kernels.products.quantised_weight import QuantisedWeight
from tandem.kernels.triton_kernels.common import next_power_of_2
from tandem.kernels.triton_kernels.products.matmul_ring import matmul_ring_kernel
from tandem.kernels.triton_kernels.products.matmul_ring_int4 import matmul_ring_int4_kernel
from tandem.kernels.triton_kernels.products.matmul_rows import matmul_rows_kernel
from tandem.kernels.triton_kernels.products.matmul_rows_int4 import matmul_rows_int4_kernel
from tandem.kernels.triton_kernels.products.matmul_rows_scaled import matmul_rows_scaled_kernel
from tandem.kernels.triton_kernels.products.matmul_stream import matmul_stream_kernel

LATE_REGISTERS = 96  # of a thread; docs/measurements.md#adapters
_DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv, torch.int32: gl.int32,
}  # fmt: skip
Scales = tuple[torch.Tensor, torch.Tensor]  # of outputs and of rows, fp32 [N] and [M], contiguous


def parts_of(plan: StreamPlan) -> int:
    """The number of pieces in which a tile ends: 128 sums a thread are too many to add others to."""
    return 2 if plan.tile_n * plan.tile_m >= 128 * 32 * plan.warps else 1


def stream_constants(plan: StreamPlan, *, has_bias: bool, silu: bool, late: bool = False) -> dict[str, Any]:
    """The kernel's compile-time constants and options for a plan."""
    return {
        "TILE_N": plan.tile_n, "TILE_M": plan.tile_m, "TILE_K": plan.tile_k, "STAGES": plan.stages,
        "HAS_BIAS": has_bias, "SILU": silu, "PARTS": parts_of(plan), "LATE": late,
        "num_warps": plan.warps,
    }  # fmt: skip


@functools.cache
def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[dtype])


def ring_constants(plan: RingPlan, *, has_bias: bool, silu: bool, late: bool = False) -> dict[str, Any]:
    """The kernel's compile-time constants and options for a plan. Warpgroups trade registers: the sum over them, with
    the loading warp's, is what the launch gave. `late` leaves registers to programs of the next kernel."""
    leaves = {"maxnreg": LATE_REGISTERS} if late and plan.groups == 1 and plan.sums <= 64 else {}
    return {
        "HEIGHT": plan.height, "TILE_M": plan.tile_m, "TILE_K": plan.tile_k, "STAGES": plan.stages,
        "GROUPS": plan.groups, "HAS_BIAS": has_bias, "SILU": silu, "PARTS": plan.parts,
        "FP8_STEPS": 0 if plan.fp8_steps == MANY_STEPS else plan.fp8_steps, "LATE": late,
        "GROUP_REGISTERS": 232, "LOADER_REGISTERS": 40, "num_warps": 4, **leaves,
    }  # fmt: skip


def ring_y_tile(plan: RingPlan, silu: bool) -> tuple[int, int]:
    return plan.rows_stored, plan.height // 2 if silu else plan.height


def rows_constants(
    plan: RowsPlan,
    num_rows: int,
    num_inputs: int,
    *,
    has_bias: bool,
    silu: bool,
    normalises: bool = False,
    adds: bool = False,
) -> dict[str, Any]:
    return {
        "ROWS": next_power_of_2(num_rows), "TILE_N": plan.tile_n, "TILE_K": plan.tile_k,
        "STEPS": num_inputs // plan.tile_k, "HAS_BIAS": has_bias, "SILU": silu, "NORM": normalises, "ADD": adds,
        "num_warps": plan.warps,
    }  # fmt: skip


def launch(
    plan: Plan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    workspace: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
    late: bool = False,
    scales: Scales | None = None,
) -> None:
    """out = x @ weight^T (+ bias, or gated). Rows of all matrices start at multiples of 16 bytes. `late`: as LATE in
    matmul_stream.py, for plans of tensor cores. With `scales` x and weight are e4m3."""
    assert plan.is_valid(x_MK.shape[0], *weight_NK.shape), f"{plan} for {x_MK.shape[0]} rows of {weight_NK.shape}"
    assert (scales is None) == (x_MK.dtype == out_MN.dtype), f"{x_MK.dtype} with {scales}"
    if isinstance(plan, RowsPlan):
        launch_rows(plan, x_MK, weight_NK, out_MN, bias_N=bias_N, silu=silu)
    elif isinstance(plan, RingPlan):
        _launch_ring(plan, x_MK, weight_NK, out_MN, bias_N, silu, late, scales)
    else:
        _launch_stream(plan, x_MK, weight_NK, out_MN, workspace, bias_N, silu, late, scales)


def launch_rows(
    plan: RowsPlan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    silu: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
    adds: bool = False,
) -> None:
    """`norm` (gain [K], epsilon): of x, before the product. `adds`: to `out_MN`."""
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    flags = {"has_bias": bias_N is not None, "silu": silu, "normalises": norm is not None, "adds": adds}
    gain_K, eps = norm or (weight_NK, 0.0)
    matmul_rows_kernel[(num_outputs // plan.tile_n,)](
        x_MK, weight_NK, out_MN, weight_NK if bias_N is None else bias_N, gain_K, out_MN.shape[1],
        x_MK.stride(0), weight_NK.stride(0), out_MN.stride(0), num_rows, eps,
        launch_pdl=True, **rows_constants(plan, num_rows, num_inputs, **flags),
    )  # fmt: skip


def launch_rows_scaled(
    plan: RowsPlan,
    x_MK: torch.Tensor,
    weight: QuantisedWeight,
    out_MN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
) -> None:
    """out = x @ weight^T (+ bias, or gated) of one row in bf16; a warp has 512 bytes of an output's weights at once."""
    (num_outputs, num_inputs), scales = weight.shape, _scales_of(weight)
    assert plan.is_valid(1, num_outputs, num_inputs), f"{plan} for {weight.shape}"
    assert plan.tile_k == 512 * plan.warps, f"{plan} for 8 bits"
    _check_one_row(x_MK)
    matmul_rows_scaled_kernel[(num_outputs // plan.tile_n,)](
        x_MK, weight.values, scales, scales if bias_N is None else bias_N, out_MN, weight.values.stride(0) // 16,
        scales.stride(0) // 8, launch_pdl=True,
        **rows_scaled_constants(plan, num_inputs, weight.group, has_bias=bias_N is not None, silu=silu),
    )  # fmt: skip


def rows_scaled_constants(
    plan: RowsPlan, num_inputs: int, group: int, *, has_bias: bool = False, silu: bool = False
) -> dict[str, Any]:
    return {
        "TILE_N": plan.tile_n, "STEPS": num_inputs // plan.tile_k, "GROUP": group or num_inputs,
        "HAS_BIAS": has_bias, "SILU": silu, "num_warps": plan.warps,
    }  # fmt: skip


def launch_rows_int4(
    plan: Int4RowPlan,
    x_MK: torch.Tensor,
    weight: QuantisedWeight,
    out_MN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
) -> None:
    """out = x @ weight^T (+ bias, or gated) of one row in bf16, over 4 bits."""
    (num_outputs, num_inputs), scales, zeros = weight.shape, _scales_of(weight), _zeros_of(weight)
    assert plan.is_valid(1, num_outputs, num_inputs), f"{plan} for {weight.shape}"
    _check_one_row(x_MK)
    matmul_rows_int4_kernel[(num_outputs // (plan.tile_n * plan.tiles),)](
        x_MK.view(torch.int32), weight.words, scales, zeros, scales if bias_N is None else bias_N, out_MN,
        weight.values.stride(0) // 16, scales.stride(0) // 8, launch_pdl=True,
        **rows_int4_constants(plan, num_inputs, weight.group, has_bias=bias_N is not None, silu=silu),
    )  # fmt: skip


def rows_int4_constants(
    plan: Int4RowPlan, num_inputs: int, group: int, *, has_bias: bool = False, silu: bool = False
) -> dict[str, Any]:
    return {
        "OUTPUTS": plan.outputs, "TILES": plan.tiles, "STEPS": num_inputs // 1024, "AHEAD": plan.ahead,
        "GROUP": group or num_inputs, "ROOM": plan.room(num_inputs),
        "HAS_BIAS": has_bias, "SILU": silu, "num_warps": plan.warps, "maxnreg": plan.registers,
    }  # fmt: skip


def launch_ring_int4(
    plan: Int4RingPlan,
    x_MK: torch.Tensor,
    weight: QuantisedWeight,
    out_MN: torch.Tensor,
    workspace: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
) -> None:
    """out = x @ weight^T (+ bias, or gated) in 16 bits, over 4 bits. Rows of x start at multiples of 16 bytes."""
    (num_rows, num_inputs), (num_outputs, _) = x_MK.shape, weight.shape
    scales, zeros = _scales_of(weight), _zeros_of(weight)
    assert plan.is_valid(num_rows, num_outputs, num_inputs), f"{plan} for {num_rows} rows of {weight.shape}"
    assert weight.group % INT4_TILE_K == 0, f"groups of {weight.group}"
    matmul_ring_int4_kernel[(plan.grid(num_rows, num_outputs),)](
        describe(weight.words, plan.height, INT4_TILE_K // 8),
        describe(x_MK, plan.tile_m, INT4_TILE_K),
        describe(out_MN, *ring_int4_y_tile(plan, silu)),
        scales, zeros, scales if bias_N is None else bias_N, workspace, num_outputs, num_rows,
        num_inputs // INT4_TILE_K, plan.lanes(num_rows), scales.stride(0) // 8, launch_pdl=True,
        **ring_int4_constants(plan, num_inputs, weight.group, has_bias=bias_N is not None, silu=silu),
    )  # fmt: skip


def ring_int4_y_tile(plan: Int4RingPlan, silu: bool) -> tuple[int, int]:
    return plan.tile_m, plan.height // 2 if silu else plan.height


def ring_int4_constants(
    plan: Int4RingPlan, num_inputs: int, group: int, *, has_bias: bool = False, silu: bool = False
) -> dict[str, Any]:
    return {
        "HEIGHT": plan.height, "TILE_M": plan.tile_m, "STAGES": plan.stages,
        "GROUP": group or num_inputs, "SPLITS": plan.splits, "HAS_BIAS": has_bias, "SILU": silu,
        "GROUP_REGISTERS": 232, "LOADER_REGISTERS": 40, "num_warps": 4,
    }  # fmt: skip


def _zeros_of(weight: QuantisedWeight) -> torch.Tensor:
    """The zero points of numbers of 4 bits, which lie as the scales do."""
    assert weight.zeros is not None, "numbers of 4 bits"
    assert weight.scales.stride() == weight.zeros.stride(), "scales and zeros lie differently"
    return weight.zeros


def _scales_of(weight: QuantisedWeight) -> torch.Tensor:
    assert weight.scales.stride(0) % 8 == 0, "scales of groups must start at multiples of 8"
    return weight.scales


def _check_one_row(x_MK: torch.Tensor) -> None:
    assert (len(x_MK), x_MK.dtype) == (1, torch.bfloat16), "one row in bf16"


def _launch_stream(
    plan: StreamPlan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    workspace: torch.Tensor,
    bias_N: torch.Tensor | None,
    silu: bool,
    late: bool,
    scales: Scales | None,
) -> None:
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    constants = stream_constants(plan, has_bias=bias_N is not None, silu=silu, late=late)
    y_tile = (plan.tile_m // constants["PARTS"], plan.tile_n // 2 if silu else plan.tile_n)
    matmul_stream_kernel[(plan.grid(num_rows, num_outputs, num_inputs),)](
        describe(weight_NK, plan.tile_n, plan.tile_k),
        describe(x_MK, plan.tile_m, plan.tile_k),
        describe(out_MN, *y_tile),
        workspace if bias_N is None else bias_N,
        *(scales or (None, None)),
        workspace,
        num_outputs,
        num_rows,
        -(-num_outputs // plan.tile_n),
        -(-num_inputs // plan.tile_k),
        plan.lanes(num_rows),
        plan.lead,
        launch_pdl=True,
        **constants,
    )


def _launch_ring(
    plan: RingPlan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    bias_N: torch.Tensor | None,
    silu: bool,
    late: bool,
    scales: Scales | None,
) -> None:
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    matmul_ring_kernel[(plan.grid(num_rows, num_outputs, num_inputs),)](
        describe(weight_NK, plan.height, plan.tile_k),
        describe(x_MK, plan.tile_m, plan.tile_k),
        describe(out_MN, *ring_y_tile(plan, silu)),
        out_MN if bias_N is None else bias_N,
        *(scales or (None, None)),
        num_outputs,
        num_rows,
        -(-num_outputs // plan.tile_n),
        -(-num_inputs // plan.tile_k),
        plan.lanes(num_rows),
        launch_pdl=True,
        **ring_constants(plan, has_bias=bias_N is not None, silu=silu, late=late),
    )


def describe(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = tile_layout(rows, columns, matrix.dtype)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
