"""Launches the products of experts: constants and grids from a plan."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.experts.plans import (
    Clamp,
    FewPlan,
    FewQuantisedPlan,
    GroupedPlan,
    MixturePlan,
)
from tandem.kernels.experts.stacked import StackedWeight
from tandem.kernels.products.fused_ops import quantise_rows
from tandem.kernels.triton_kernels.common import cdiv, next_power_of_2, overlap
from tandem.kernels.triton_kernels.experts.few import few_down_kernel, few_gate_up_kernel
from tandem.kernels.triton_kernels.experts.grouped import add_up_kernel, grouped_kernel
from tandem.kernels.triton_kernels.experts.sort import sort_triton
from tandem.kernels.triton_kernels.experts.stored import Stored


def grouped_constants(
    plan: GroupedPlan,
    *,
    is_gated: bool,
    rounded: bool = False,
    bits: int = 0,
    is_e2m1: bool = False,
    group: int = 0,
    cut: int = 0,
    has_bias: bool = False,
    clamped: bool = False,
) -> dict[str, Any]:
    """The kernel's compile-time constants and options for a plan and matrices that are stored so."""
    return {
        "TILE_N": plan.tile_n, "TILE_M": plan.tile_m, "TILE_K": plan.tile_k, "GATED": is_gated, "BITS": bits,
        "E2M1": is_e2m1, "GROUP": group, "CUT": cut, "HAS_BIAS": has_bias, "CLAMPED": clamped, "ROUNDED": rounded,
        "STAGES": plan.stages, "num_warps": plan.warps,
    }  # fmt: skip


def few_constants(
    plan: FewPlan, num_outputs: int, num_inputs: int, *, is_scaled: bool = False, group: int = 0
) -> dict[str, Any]:
    return {
        "SIZE": num_outputs, "TILE_N": plan.tile_n, "TILE_K": plan.tile_k, "STEPS": num_inputs // plan.tile_k,
        "SCALED": is_scaled, "GROUP": group, "num_warps": plan.warps,
    }  # fmt: skip


def launch(
    plan: MixturePlan,
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: torch.Tensor | StackedWeight,
    down_XEF: torch.Tensor | StackedWeight,
    norm: tuple[torch.Tensor, float] | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """What the mixture makes of x, [T, E]. Rows of x and of matrices start at multiples of 16 elements.

    `norm` (gain [E], epsilon), by FewPlans alone: x, which is contiguous, becomes x + what the mixture makes of x
    normalised, and is returned.
    """
    (num_experts, hidden, width), num_tokens, num_pairs = down_XEF.shape, len(x_TE), ids_Tk.numel()
    dtype, device = x_TE.dtype, x_TE.device
    gate_up, down = Stored.of(gate_up_XGE), Stored.of(down_XEF)
    activated = torch.empty((num_pairs, width), dtype=dtype, device=device)
    out = torch.empty((num_tokens, hidden), dtype=dtype, device=device) if norm is None else x_TE
    if isinstance(plan.gate_up, FewPlan):
        assert isinstance(plan.down, FewPlan), f"{plan} mixes ways"
        assert clamp is None, f"{plan} knows SiLU alone"
        _launch_few(plan.gate_up, plan.down, x_TE, ids_Tk, weights_Tk, gate_up, down, activated, out, norm)
        return out
    assert norm is None, f"{plan} takes x as it is"
    if isinstance(plan.gate_up, FewQuantisedPlan):
        assert isinstance(plan.down, FewQuantisedPlan), f"{plan} mixes ways"
        from tandem.kernels.triton_kernels.experts.launch_gluon import launch_few_quantised  # not every Triton has it

        launch_few_quantised(plan.gate_up, plan.down, x_TE, ids_Tk, weights_Tk, gate_up, down, activated, out, clamp)
        return out
    assert not isinstance(plan.down, FewPlan | FewQuantisedPlan), f"{plan} mixes ways"
    assert plan.down.tile_m == plan.gate_up.tile_m, f"{plan} cuts rows in two ways"
    order, tiles = sort_triton(ids_Tk, num_experts, plan.gate_up.tile_m)
    products = torch.empty((num_pairs, hidden), dtype=dtype, device=device)
    if isinstance(plan.gate_up, GroupedPlan):
        assert isinstance(plan.down, GroupedPlan), f"{plan} mixes ways"
        common: dict[str, Any] = {"order": order, "tiles": tiles, "weights_Tk": weights_Tk, "clamp": clamp}
        common["rounded"] = plan.rounded
        _launch_grouped(plan.gate_up, x_TE, gate_up, activated, **common, is_gated=True)
        _launch_grouped(plan.down, activated, down, products, **common, is_gated=False)
    else:
        from tandem.kernels.triton_kernels.experts.launch_gluon import multiply  # not every Triton has Gluon

        multiply(plan, x_TE, order, tiles, weights_Tk, gate_up, down, activated, products, clamp)
    block = min(1024, next_power_of_2(hidden))
    add_up_kernel[(num_tokens, cdiv(hidden, block))](
        products, ids_Tk, out, SIZE=hidden, TOP_K=ids_Tk.shape[1], BLOCK=block, num_warps=4, **overlap(device)
    )
    return out


def _launch_few(
    gate_up_plan: FewPlan,
    down_plan: FewPlan,
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    activated: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
) -> None:
    gain, eps = norm or (x_TE, 0.0)
    assert not gate_up.has_bias, "experts with biases have no FewPlan"
    (num_tokens, top_k), (_, hidden, width) = ids_Tk.shape, down.values.shape
    constants: dict[str, Any] = {"is_scaled": bool(down.bits), "group": down.group}
    few_gate_up_kernel[(width // gate_up_plan.tile_n, num_tokens * top_k)](
        x_TE, gate_up.values, gate_up.scales, ids_Tk, gain, activated,
        x_TE.stride(0) // 16, gate_up.row, gate_up.expert, width, top_k, eps,
        NORM=norm is not None, **few_constants(gate_up_plan, width, hidden, **constants), **overlap(x_TE.device),
    )  # fmt: skip
    few_down_kernel[(hidden // down_plan.tile_n, num_tokens)](
        activated, down.values, down.scales, ids_Tk, weights_Tk, out,
        down.row, down.expert, TOP_K=top_k, ADD=norm is not None,
        **few_constants(down_plan, hidden, width, **constants), **overlap(x_TE.device),
    )  # fmt: skip


def _launch_grouped(
    plan: GroupedPlan,
    x: torch.Tensor,
    weight: Stored,
    out: torch.Tensor,
    *,
    order: torch.Tensor,
    tiles: torch.Tensor,
    weights_Tk: torch.Tensor,
    rounded: bool,
    clamp: Clamp | None,
    is_gated: bool,
) -> None:
    values, num_outputs, num_inputs = weight.values, out.shape[1], x.shape[1]
    cut = num_inputs if num_inputs % plan.tile_k else 0
    assert num_outputs % plan.tile_n == 0, f"{plan} for {tuple(values.shape)}"
    assert weight.is_e2m1 or not cut, f"{plan} for {num_inputs} inputs"
    assert weight.group % plan.tile_k == 0, f"{plan} for groups of {weight.group}"
    x, x_scales = quantise_rows(x) if rounded else (x, weight.scales)
    tiles_n, (alpha, limit) = num_outputs // plan.tile_n, clamp or (1.0, 0.0)
    constants = grouped_constants(
        plan, is_gated=is_gated, rounded=rounded, bits=weight.bits, is_e2m1=weight.is_e2m1, group=weight.group,
        cut=cut, has_bias=weight.has_bias, clamped=clamp is not None,
    )  # fmt: skip
    grouped_kernel[(len(tiles) * tiles_n,)](
        x, x_scales, values, weight.scales, weight.zeros, weight.bias, order, tiles, weights_Tk, out,
        cdiv(num_inputs, plan.tile_k), tiles_n, x.stride(0) // 16, weight.row, weight.expert, num_outputs,
        out.stride(0) // 16, weights_Tk.shape[1], alpha, limit, **constants, **overlap(x.device),
    )  # fmt: skip
