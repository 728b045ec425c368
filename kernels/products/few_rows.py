"""The products of a decoder layer for a decode step of one or two rows, with what lies between them done inside: the
norm of their input, SiLU times up, and the addition to the residual stream. So a layer is five launches: norm and QKV,
attention, output projection added, norm and gate-up, down projection added.

R rows, E hidden size, K inputs, N outputs, G = 2 * intermediate size of a gated MLP. On Hopper; results are
deterministic. Eager twins: kernels/reference/few_rows.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from tandem.kernels.products import product_trials
from tandem.kernels.products.fused_ops import is_fused, silu_mul
from tandem.kernels.products.matmul_device import is_hopper
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, ROWS_CUTS, RowsPlan

MOST_ROWS = 2  # docs/measurements.md#steps-of-few-rows
# Weights: the kernel of a larger one has no time to spare for a norm, measured; docs/measurements.md#steps-of-few-rows.
LARGEST_PRODUCT = 16 << 20


def plan_for(num_rows: int, num_outputs: int, num_inputs: int) -> RowsPlan | None:
    """How a product of so few rows is cut, whatever its sizes; None: it isn't served. Pure."""
    if not 0 < num_rows <= MOST_ROWS or num_outputs <= 0 or num_inputs <= 0:
        return None
    for tile_k, warps in ROWS_CUTS:
        plan = RowsPlan(2, tile_k, warps)
        if tile_k * num_rows <= 2048 and plan.is_valid(num_rows, num_outputs, num_inputs):
            return plan
    return None


def pays(num_rows: int, products: tuple[tuple[int, int], ...]) -> bool:
    """Whether a layer with products of these sizes (outputs, inputs) takes fewer launches. Pure."""
    small = all(outputs * inputs <= LARGEST_PRODUCT for outputs, inputs in products)
    return bool(products) and small and all(plan_for(num_rows, *sizes) is not None for sizes in products)


def serves(x_RE: torch.Tensor, products: tuple[tuple[int, int], ...]) -> bool:
    """Whether a step of rows like these takes this way."""
    if not is_fused(x_RE) or x_RE.dtype not in (torch.bfloat16, torch.float16) or not is_hopper(x_RE.device):
        return False
    return pays(x_RE.shape[0], products) and _are_right(x_RE.shape[0], products, x_RE.dtype, x_RE.device)


@functools.cache
def _are_right(num_rows: int, products: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer's products (QKV, output, gate-up and down, or a router's) give what torch's operations do."""
    checks = [_norm_trial, _add_trial, *((_norm_trial,) if len(products) == 3 else (_gated_trial, _add_trial))]
    return all(
        check(num_rows, *sizes, dtype=dtype, device=device) for check, sizes in zip(checks, products, strict=True)
    )


def _norm_trial(num_rows: int, num_outputs: int, num_inputs: int, **kind: Any) -> bool:
    x, gain, weight = _trial_tensors(num_rows, num_outputs, num_inputs, **kind)
    return product_trials.passes(
        "a norm and product of few rows",
        lambda: norm_linear(x, gain, 1e-5, weight),
        lambda: functional.linear(functional.rms_norm(x, (num_inputs,), gain, 1e-5), weight),
    )


def _gated_trial(num_rows: int, num_outputs: int, num_inputs: int, **kind: Any) -> bool:
    x, gain, weight = _trial_tensors(num_rows, num_outputs, num_inputs, **kind)
    return product_trials.passes(
        "a norm and gated product of few rows",
        lambda: norm_linear_silu_mul(x, gain, 1e-5, weight),
        lambda: silu_mul(functional.linear(functional.rms_norm(x, (num_inputs,), gain, 1e-5), weight), GATE_UP_GROUP),
    )


def _add_trial(num_rows: int, num_outputs: int, num_inputs: int, **kind: Any) -> bool:
    x, _, weight = _trial_tensors(num_rows, num_outputs, num_inputs, **kind)
    residual = product_trials.random_matrix(num_rows, num_outputs, seed=4, **kind)

    def ours() -> torch.Tensor:
        added = residual.clone()
        add_linear(added, x, weight)
        return added

    return product_trials.passes("a product of few rows, added", ours, lambda: residual + functional.linear(x, weight))


def _trial_tensors(
    num_rows: int, num_outputs: int, num_inputs: int, **kind: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, K], a norm's gain [K], weights [N, K]."""
    x = product_trials.random_matrix(num_rows, num_inputs, seed=1, **kind)
    gain = 1 + product_trials.random_matrix(1, num_inputs, seed=2, **kind)[0]
    return x, gain, product_trials.random_matrix(num_outputs, num_inputs, seed=3, **kind)


def norm_linear(
    x_RE: torch.Tensor,
    gain_E: torch.Tensor,
    eps: float,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """rms_norm(x) @ weight^T + bias -> [R, N] in x's type, or in `dtype`; the norm's statistics and result in fp32."""
    return _launch(x_RE, weight_NE, None, bias_N=bias_N, norm=(gain_E, eps), dtype=dtype)


def norm_linear_silu_mul(
    x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float, grouped_GE: torch.Tensor
) -> torch.Tensor:
    """The gated MLP's first half -> [R, G / 2], for weights laid out by matmul.group_gate_up."""
    return _launch(x_RE, grouped_GE, None, norm=(gain_E, eps), silu=True)


def add_linear(
    residual_RN: torch.Tensor, x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> None:
    """residual += x @ weight^T + bias in place, summed in fp32 and rounded once."""
    _launch(x_RK, weight_NK, residual_RN, bias_N=bias_N)


def _launch(
    x_RK: torch.Tensor,
    weight_NK: torch.Tensor,
    residual_RN: torch.Tensor | None,
    *,
    bias_N: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    silu: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    from tandem.kernels.triton_kernels.products.matmul_launch import launch_rows

    plan = plan_for(x_RK.shape[0], *weight_NK.shape)
    assert plan is not None, f"{tuple(x_RK.shape)} times {tuple(weight_NK.shape)}: ask `serves` first"
    out = residual_RN
    if out is None:
        num_outputs = weight_NK.shape[0] // (2 if silu else 1)
        out = torch.empty((x_RK.shape[0], num_outputs), dtype=dtype or x_RK.dtype, device=x_RK.device)
    launch_rows(plan, x_RK, weight_NK, out, bias_N=bias_N, silu=silu, norm=norm, adds=residual_RN is not None)
    return out
