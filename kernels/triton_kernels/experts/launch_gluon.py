"""Launches the products of experts that are in Gluon: constants and grids from a plan."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.experts.plans import (
    RING_GATES,
    RING_OUTPUTS,
    Clamp,
    FewQuantisedPlan,
    GroupedRingPlan,
    MixturePlan,
    StreamedPlan,
)
from tandem.kernels.products.fused_ops import quantise_rows
from tandem.kernels.products.quantised_weight import FP8
from tandem.kernels.triton_kernels.common import cdiv, multiprocessors, next_power_of_2, overlap
from tandem.kernels.triton_kernels.experts.few_4bit import few_4bit_down_kernel, few_4bit_gate_up_kernel
from tandem.kernels.triton_kernels.experts.few_8bit import few_8bit_down_kernel, few_8bit_gate_up_kernel
from tandem.kernels.triton_kernels.experts.grouped_ring import BOX, gather_rows_kernel, grouped_ring_kernel
from tandem.kernels.triton_kernels.experts.grouped_ring_e4m3 import HEIGHT, grouped_ring_e4m3_kernel
from tandem.kernels.triton_kernels.experts.stored import Stored
from tandem.kernels.triton_kernels.experts.streamed import streamed_kernel
from tandem.kernels.triton_kernels.products.matmul_launch import describe, tile_layout

MOST_COLUMNS, GATHERED_ROWS = 2048, 4  # that a program gathers at once; guesses


def few_quantised_constants(plan: FewQuantisedPlan, weight: Stored, num_inputs: int, all_inputs: int) -> dict[str, Any]:
    """`all_inputs`: of all experts that a program multiplies with."""
    steps = cdiv(all_inputs, 1024 if weight.bits == 4 else 512)
    common = {
        "K": num_inputs, "OUTPUTS": plan.outputs, "AHEAD": min(plan.ahead, steps),
        "GROUP": weight.group or num_inputs, "num_warps": plan.warps,
    }  # fmt: skip
    if weight.bits == 8:
        return common
    return common | {"ROOM": next_power_of_2(steps) * 32, "E2M1": weight.is_e2m1, "HAS_BIAS": weight.has_bias}


def streamed_constants(
    plan: StreamedPlan,
    num_inputs: int,
    *,
    is_gated: bool,
    is_e2m1: bool = False,
    group: int = 0,
    has_bias: bool = False,
    clamped: bool = False,
) -> dict[str, Any]:
    return {
        "K": num_inputs, "TILE_M": plan.tile_m, "REPEATS": plan.repeats, "AHEAD": plan.ahead, "GATED": is_gated,
        "E2M1": is_e2m1, "GROUP": group, "HAS_BIAS": has_bias, "CLAMPED": clamped, "num_warps": plan.warps,
        **({"maxnreg": plan.registers} if plan.registers else {}),
    }  # fmt: skip


def launch_few_quantised(
    gate_up_plan: FewQuantisedPlan,
    down_plan: FewQuantisedPlan,
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    activated: torch.Tensor,
    out: torch.Tensor,
    clamp: Clamp | None,
) -> None:
    (num_tokens, top_k), hidden, width = ids_Tk.shape, out.shape[1], activated.shape[1]
    gate_up_grid = 2 * width // (gate_up_plan.outputs * gate_up_plan.warps), num_tokens * top_k
    down_grid = hidden // (down_plan.outputs * down_plan.warps), num_tokens
    gate_up_places = x_TE.stride(0) // 16, gate_up.row, gate_up.expert, width, top_k
    alpha, limit = clamp or (1.0, 0.0)
    of_gate_up = few_quantised_constants(gate_up_plan, gate_up, hidden, hidden)
    of_down = few_quantised_constants(down_plan, down, width, top_k * width) | {"TOP_K": top_k}
    if gate_up.bits == 4:
        few_4bit_gate_up_kernel[gate_up_grid](
            x_TE.view(torch.int32), gate_up.values, gate_up.scales, gate_up.zeros, gate_up.bias, ids_Tk, activated,
            *gate_up_places, alpha, limit, CLAMPED=clamp is not None, **of_gate_up, **overlap(x_TE.device),
        )  # fmt: skip
        few_4bit_down_kernel[down_grid](
            activated.view(torch.int32), down.values, down.scales, down.zeros, down.bias, ids_Tk, weights_Tk, out,
            down.row, down.expert, hidden, **of_down, **overlap(x_TE.device),
        )  # fmt: skip
    else:
        few_8bit_gate_up_kernel[gate_up_grid](
            x_TE, gate_up.values, gate_up.scales, ids_Tk, activated, *gate_up_places, **of_gate_up,
            **overlap(x_TE.device),
        )  # fmt: skip
        few_8bit_down_kernel[down_grid](
            activated, down.values, down.scales, ids_Tk, weights_Tk, out, down.row, down.expert, hidden, **of_down,
            **overlap(x_TE.device),
        )  # fmt: skip


def multiply(
    plan: MixturePlan,
    x_TE: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    activated_PF: torch.Tensor,
    products_PE: torch.Tensor,
    clamp: Clamp | None,
) -> None:
    """Both products of pairs that are cut into tiles."""
    if isinstance(plan.gate_up, StreamedPlan):
        assert isinstance(plan.down, StreamedPlan), f"{plan} mixes ways"
        common: dict[str, Any] = {"order": order, "tiles": tiles, "weights_Tk": weights_Tk, "clamp": clamp}
        _launch_streamed(plan.gate_up, x_TE, gate_up, activated_PF, **common, is_gated=True)
        _launch_streamed(plan.down, activated_PF, down, products_PE, **common, is_gated=False)
        return
    assert isinstance(plan.gate_up, GroupedRingPlan), f"{plan} mixes ways"
    assert isinstance(plan.down, GroupedRingPlan), f"{plan} mixes ways"
    rows_TE, scales_T1, rows_PE = x_TE, None, products_PE  # what down makes takes their place
    if plan.rounded:
        rows_TE, scales_T1 = quantise_rows(x_TE)
        rows_PE = products_PE.view(FP8).flatten()[: products_PE.numel()].view(products_PE.shape)
    weights_P, scales_P = _gather_rows(rows_TE, order, weights_Tk, rows_PE, scales_T1)
    common = {"order": order, "tiles": tiles, "weights_P": weights_P}
    _launch_ring(plan.gate_up, rows_PE, scales_P, gate_up, activated_PF, **common, is_gated=True)
    rows_PF, scales_P1 = quantise_rows(activated_PF) if plan.rounded else (activated_PF, None)
    _launch_ring(plan.down, rows_PF, scales_P1, down, products_PE, **common, is_gated=False)


def _launch_streamed(
    plan: StreamedPlan,
    x: torch.Tensor,
    weight: Stored,
    out: torch.Tensor,
    *,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weights_Tk: torch.Tensor,
    clamp: Clamp | None,
    is_gated: bool,
) -> None:
    num_outputs, num_inputs = out.shape[1], x.shape[1]
    tiles_n, (alpha, limit) = num_outputs // plan.outputs(is_gated=is_gated), clamp or (1.0, 0.0)
    assert tiles_n * plan.outputs(is_gated=is_gated) == num_outputs, f"{plan} for {num_outputs} outputs"
    constants = streamed_constants(
        plan, num_inputs, is_gated=is_gated, is_e2m1=weight.is_e2m1, group=weight.group, has_bias=weight.has_bias,
        clamped=is_gated and clamp is not None,
    )  # fmt: skip
    streamed_kernel[(len(tiles) * tiles_n,)](
        x, weight.values, weight.scales, weight.zeros, weight.bias, order, tiles, weights_Tk, out,
        tiles_n, x.stride(0) // 16, weight.row, weight.expert, num_outputs, out.stride(0) // 16, weights_Tk.shape[1],
        alpha, limit, **constants, **overlap(x.device),
    )  # fmt: skip


def _gather_rows(
    x_TE: torch.Tensor,
    order: torch.Tensor,
    weights_Tk: torch.Tensor,
    rows_PE: torch.Tensor,
    scales_T1: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fills rows with those of the tokens of pairs, in their order; -> the pairs' weights and scales, fp32 [P]."""
    (num_pairs, hidden), top_k = rows_PE.shape, weights_Tk.shape[1]
    weights_P = torch.empty(num_pairs, dtype=torch.float32, device=x_TE.device)
    scales_P = None if scales_T1 is None else torch.empty_like(weights_P)
    gather_rows_kernel[(cdiv(num_pairs, GATHERED_ROWS),)](
        x_TE, order, weights_Tk, weights_P if scales_T1 is None else scales_T1, rows_PE, weights_P,
        weights_P if scales_P is None else scales_P,
        len(x_TE), num_pairs, top_k, x_TE.stride(0) // 16, SIZE=hidden,
        BLOCK=min(MOST_COLUMNS, next_power_of_2(hidden)), ROWS=GATHERED_ROWS, HAS_SCALES=scales_T1 is not None,
        num_warps=4, **overlap(x_TE.device),
    )  # fmt: skip
    return weights_P, scales_P


def ring_constants(plan: GroupedRingPlan, dtype: torch.dtype, *, is_gated: bool) -> dict[str, Any]:
    y_tile = (plan.tile_m, RING_GATES // 2) if is_gated else (plan.tile_m // 2, RING_OUTPUTS // 2)
    return {"TILE_K": plan.tile_k, **_both_rings(plan, y_tile, dtype, is_gated=is_gated)}


def ring_e4m3_constants(plan: GroupedRingPlan, dtype: torch.dtype, group: int, *, is_gated: bool) -> dict[str, Any]:
    y_tile = plan.tile_m, (RING_GATES if is_gated else RING_OUTPUTS) // 4
    return {"GROUP": group, **_both_rings(plan, y_tile, dtype, is_gated=is_gated)}


def _both_rings(
    plan: GroupedRingPlan, y_tile: tuple[int, int], dtype: torch.dtype, *, is_gated: bool
) -> dict[str, Any]:
    return {
        "TILE_M": plan.tile_m, "STAGES": plan.stages, "GATED": is_gated, "y_layout": tile_layout(*y_tile, dtype),
        "GROUP_REGISTERS": 232, "LOADER_REGISTERS": 40, "num_warps": 4,
    }  # fmt: skip


def ring_e4m3_box(*, is_gated: bool) -> int:
    """Rows of the matrix that are loaded at once: gates and ups take turns in eights."""
    return 8 if is_gated else int(HEIGHT.value)


def _launch_ring(
    plan: GroupedRingPlan,
    rows: torch.Tensor,
    scales_P: torch.Tensor | None,
    weight: Stored,
    out: torch.Tensor,
    *,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weights_P: torch.Tensor,
    is_gated: bool,
) -> None:
    """Multiplies rows in the order of experts, whose weights are `weights_P`; over e4m3 they are rounded and have
    scales."""
    num_experts, matrix_rows, num_inputs = weight.values.shape
    assert weight.values.is_contiguous(), "matrices of experts lie apart"
    matrix, num_outputs = weight.values.view(num_experts * matrix_rows, num_inputs), out.shape[1]
    x_desc, of_tile = describe(rows, plan.tile_m, plan.tile_k), RING_GATES if is_gated else RING_OUTPUTS
    tiles_n = num_outputs // (of_tile if scales_P is None else of_tile // 2)
    num_tiles = len(tiles) * tiles_n
    grid = (min(num_tiles, multiprocessors(out.device)),)
    sizes = num_tiles, tiles_n, num_inputs // plan.tile_k, matrix_rows, num_outputs, out.stride(0) // 16
    if scales_P is None:
        grouped_ring_kernel[grid](
            describe(matrix, BOX.value, plan.tile_k), x_desc, out, order, tiles, weights_P, *sizes,
            launch_pdl=True, **ring_constants(plan, out.dtype, is_gated=is_gated),
        )  # fmt: skip
    else:
        grouped_ring_e4m3_kernel[grid](
            describe(matrix, ring_e4m3_box(is_gated=is_gated), plan.tile_k), x_desc, out, order, tiles, weight.scales,
            scales_P, weights_P, *sizes,
            launch_pdl=True, **ring_e4m3_constants(plan, out.dtype, weight.group, is_gated=is_gated),
        )  # fmt: skip
