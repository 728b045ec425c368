"""Launches the Hopper product: descriptors, constants and grid from a plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.kernels.triton_kernels.matmul_stream import matmul_stream_kernel

if TYPE_CHECKING:
    from tandem.kernels.matmul import Plan

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def stream_constants(plan: Plan, *, has_bias: bool, has_addend: bool, silu: bool) -> dict[str, Any]:
    """The kernel's compile-time constants and options for a plan."""
    constants: dict[str, Any] = {
        "TILE_N": plan.tile_n, "TILE_M": plan.tile_m, "TILE_K": plan.tile_k, "STAGES": plan.stages,
        "HAS_BIAS": has_bias, "HAS_ADDEND": has_addend, "SILU": silu, "PARTS": 2 if plan.tile_m > 128 else 1,
        "num_warps": plan.warps,
    }  # fmt: skip
    if plan.tile_n * plan.tile_m <= 8192 and plan.warps == 4:
        constants["maxnreg"] = 128  # two programs a multiprocessor; the multiplying warps take over the loader's share
    return constants


@functools.cache
def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[dtype])


def launch(
    plan: Plan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    partials: torch.Tensor,
    counters: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    addend_MN: torch.Tensor | None,
    silu: bool,
) -> None:
    """out = x @ weight^T (+ bias, + addend, or gated). Rows of all matrices start at multiples of 16 bytes."""
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    assert plan.is_valid(num_rows, num_outputs, num_inputs), f"{plan} for {num_rows} rows of {weight_NK.shape}"
    constants = stream_constants(plan, has_bias=bias_N is not None, has_addend=addend_MN is not None, silu=silu)
    y_tile = (plan.tile_m // constants["PARTS"], plan.tile_n // 2 if silu else plan.tile_n)
    y_desc = _describe(out_MN, *y_tile)
    matmul_stream_kernel[(plan.grid(num_rows, num_outputs, num_inputs),)](
        _describe(weight_NK, plan.tile_n, plan.tile_k),
        _describe(x_MK, plan.tile_m, plan.tile_k),
        y_desc,
        y_desc if addend_MN is None else _describe(addend_MN, *y_tile),
        counters if bias_N is None else bias_N,
        partials,
        counters,
        num_outputs,
        -(-num_outputs // plan.tile_n),
        -(-num_inputs // plan.tile_k),
        plan.lanes(num_rows),
        launch_pdl=True,
        **constants,
    )


def _describe(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = tile_layout(rows, columns, matrix.dtype)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
