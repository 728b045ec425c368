"""Products over quantised weights: y = x @ weight^T.

Up to some hundred rows the kernel of triton_kernels/products/matmul_quantised.py reads each weight once. On Hopper one
row has matmul_rows_scaled.py, over 4 bits matmul_rows_int4.py and many rows matmul_ring_int4.py, and over fp8 weights
with a scale an output more rows have the kernels of 16 bits. Over fp8 weights rows, but one alone, are rounded to e4m3
as well, with a scale a row. Prompts over fp8 weights with a scale an output are multiplied so by torch; other prompts,
and devices without Triton, have the weight made whole first.

M rows, N outputs, K inputs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.nn import functional

from tandem.kernels.products import product_trials
from tandem.kernels.products.fused_ops import is_fused, quantise_rows, rms_norm, silu_mul
from tandem.kernels.products.matmul_device import is_hopper, shared_bytes_of, workspace_of
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, RowsPlan, StreamPlan
from tandem.kernels.products.quantised_plans import (
    MOST_TILES,
    AnyPlan,
    Int4RingPlan,
    Int4RowPlan,
    QuantisedPlan,
    choose_hopper_plan,
    choose_plan,
    takes_rounded,
)
from tandem.kernels.products.quantised_weight import QuantisedWeight, quantise_fp8, quantise_int4

PREFERRED_SCALED_ROWS = 129  # from here torch's fp8 products come before the kernel, whose tiles are 128; a guess
LEAST_SCALED_ROWS = 17  # below, torch's fp8 products need padding; and few rows are the kernel's


class RoundedRows(NamedTuple):
    """Activations that products over fp8 weights take as they are, in place of a tensor [M, K]: values * scales."""

    values: torch.Tensor  # e4m3 [M, K]
    scales: torch.Tensor  # fp32 [M, 1]
    dtype: torch.dtype  # of what was rounded, and of the product

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def whole(self) -> torch.Tensor:
        return (self.values.float() * self.scales).to(self.dtype)


def linear(
    x_MK: torch.Tensor | RoundedRows,
    weight: QuantisedWeight,
    bias_N: torch.Tensor | None = None,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias [M, N] in the type of x, summed in fp32. `silu`: [M, N / 2], silu of gate's outputs times
    up's, for a weight whose rows come by turns (matmul.group_gate_up)."""
    plan = _plan(x_MK, weight, silu)
    if plan is not None:
        return _by_plan(plan, x_MK, weight, bias_N, silu)
    if _takes_scaled(x_MK, weight):
        out = scaled_linear(x_MK, weight, bias_N)
    else:
        x_MK = x_MK.whole() if isinstance(x_MK, RoundedRows) else x_MK
        out = functional.linear(x_MK, made_whole(weight, x_MK), bias_N)
    return silu_mul(out, GATE_UP_GROUP) if silu else out


def rounds(x_MK: torch.Tensor, weight: QuantisedWeight) -> bool:
    """Whether `linear` rounds x to e4m3, so that a norm before it may."""
    plan = _plan(x_MK, weight, silu=False)
    takes = _takes_scaled(x_MK, weight) if plan is None else takes_rounded(plan)
    return takes and _norms_round_right(x_MK.dtype, x_MK.device)


def rounded_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
) -> RoundedRows:
    """fused_ops.rms_norm, or add_rms_norm, rounded in the same launch: for what `rounds` says yes to."""
    from tandem.kernels.triton_kernels.products.fused import rms_norm_triton

    scales = torch.empty((x_TE.shape[0], 1), dtype=torch.float32, device=x_TE.device)
    return RoundedRows(rms_norm_triton(x_TE, residual_TE, weight_E, eps, scales), scales, x_TE.dtype)


@functools.cache
def _norms_round_right(dtype: torch.dtype, device: torch.device) -> bool:
    x = product_trials.random_matrix(7, 1024, dtype, device, 1)
    gain = 1 + product_trials.random_matrix(1, 1024, dtype, device, 2)[0]

    def expected() -> torch.Tensor:
        return RoundedRows(*quantise_rows(rms_norm(x, gain, 1e-5)), dtype).whole()

    return product_trials.passes("a norm that rounds", lambda: rounded_rms_norm(x, None, gain, 1e-5).whole(), expected)


def made_whole(weight: QuantisedWeight, x_MK: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] in the type of x, in one pass where Triton runs."""
    plan = choose_plan(2, *weight.shape, weight.group, weight.bits)
    if not is_fused(x_MK) or plan is None:
        return weight.dequantised(x_MK.dtype)
    from tandem.kernels.triton_kernels.products.matmul_quantised_launch import dequantise

    out = torch.empty(weight.shape, dtype=x_MK.dtype, device=x_MK.device)
    dequantise(weight, out, plan.tile_k)
    return out


def run_plan(plan: AnyPlan, x_MK: torch.Tensor, weight: QuantisedWeight, *, silu: bool = False) -> torch.Tensor:
    """The product by a given plan: for tuning and tests."""
    return _by_plan(plan, x_MK, weight, None, silu)


def scaled_linear(
    x_MK: torch.Tensor | RoundedRows, weight: QuantisedWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T + bias with x in e4m3, too, each row by a scale of its own, by the tensor cores' fp8 products."""
    values, scales = _rounded(x_MK)
    scale_N = weight.scales if weight.scales.is_contiguous() else weight.scales.contiguous()
    out: torch.Tensor = torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=scale_N, bias=bias_N, out_dtype=x_MK.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return out


def _rounded(x_MK: torch.Tensor | RoundedRows) -> tuple[torch.Tensor, torch.Tensor]:
    return (x_MK.values, x_MK.scales) if isinstance(x_MK, RoundedRows) else quantise_rows(x_MK)


@functools.cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """int32 zeros: how many parts of each tile have arrived. Products on one stream share them."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def prepare(device: torch.device) -> None:
    """Makes what products share, before graphs are captured."""
    if device.type == "cuda":
        arrivals_of(device)
    if is_hopper(device):
        workspace_of(device)


def _plan(x_MK: torch.Tensor | RoundedRows, weight: QuantisedWeight, silu: bool) -> AnyPlan | None:
    values = x_MK.values if isinstance(x_MK, RoundedRows) else x_MK
    if not is_fused(values) or values.dim() != 2 or x_MK.dtype not in (torch.bfloat16, torch.float16):
        return None
    if values.stride(1) != 1 or values.stride(0) % 16 or values.data_ptr() % 16:
        return None
    scales = weight.scales.dtype
    # torch's len() of a tensor is Python, and every product of a step launched layer by layer asks.
    num_rows = values.shape[0]
    return _chosen(num_rows, weight.shape, weight.group, weight.bits, scales, x_MK.dtype, values.device, silu)


@functools.lru_cache(maxsize=4096)
def _chosen(
    num_rows: int,
    shape: tuple[int, int],
    group: int,
    bits: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    silu: bool,
) -> AnyPlan | None:
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    of_weight = group, bits, scale_dtype, dtype, device
    shared_bytes = shared_bytes_of(device)
    may_round = dtype == torch.bfloat16
    takes_others = may_round and (num_rows == 1 or scale_dtype == torch.float32)
    if is_hopper(device) and (takes_others or (bits == 4 and num_rows > 1)):
        tuned = choose_hopper_plan(num_rows, *shape, group, bits)
        if tuned is not None and _is_right(tuned, shape[1], *of_weight, silu):
            return tuned
    prefers_scaled = may_round and bits == 8 and not group and num_rows >= PREFERRED_SCALED_ROWS
    if prefers_scaled and _may_scale(shape) and _scaled_is_right(device):
        return None
    for rounding in (True, False) if may_round else (False,):
        plan = choose_plan(num_rows, *shape, group, bits, may_round=rounding)
        plan = None if plan is None else plan.fitting(shared_bytes, bits)
        if plan is not None and _is_right(plan, 4 * plan.splits * max(plan.tile_k, group), *of_weight, silu):
            return plan
    return None


@functools.cache
def _is_right(
    plan: AnyPlan,
    num_inputs: int,
    group: int,
    bits: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    silu: bool,
) -> bool:
    """Tried on some tiles, with a row less than a tile's, or one more, where parts of two tiles' sums may meet."""
    plan = plan._replace(lead=0) if isinstance(plan, StreamPlan) else plan  # as fits many tiles
    tile_m = 1 if isinstance(plan, RowsPlan | Int4RowPlan) else plan.tile_m
    rows = tile_m + 1 if isinstance(plan, Int4RingPlan) and plan.splits > 1 else max(1, tile_m - 1)
    x = product_trials.random_matrix(rows, num_inputs, dtype, device, 1)
    plain = product_trials.random_matrix(4 * plan.tile_n, num_inputs, torch.float32, device, 2)
    weight = quantise_int4(plain, group, scale_dtype) if bits == 4 else quantise_fp8(plain, group)

    def expected() -> torch.Tensor:
        values, scales = quantise_rows(x) if takes_rounded(plan) else (x, 1)
        product = functional.linear(values.float() * scales, weight.dequantised(torch.float32))
        return silu_mul(product, GATE_UP_GROUP) if silu else product

    return product_trials.passes(
        f"the product of {bits} bits by {plan}", lambda: run_plan(plan, x, weight, silu=silu), expected
    )


def _by_plan(
    plan: AnyPlan,
    x_MK: torch.Tensor | RoundedRows,
    weight: QuantisedWeight,
    bias_N: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    from tandem.kernels.triton_kernels.products import matmul_quantised_launch

    num_outputs, device = weight.shape[0] // (2 if silu else 1), weight.values.device
    out = torch.empty((x_MK.shape[0], num_outputs), dtype=x_MK.dtype, device=device)
    if takes_rounded(plan):
        x, x_scales = _rounded(x_MK)
    else:
        x, x_scales = x_MK.whole() if isinstance(x_MK, RoundedRows) else x_MK, None
    if isinstance(plan, QuantisedPlan):
        matmul_quantised_launch.launch(
            plan, x, weight, out, arrivals_of(device), bias_N=bias_N, silu=silu, x_scales=x_scales
        )
        return out
    from tandem.kernels.triton_kernels.products import matmul_launch  # Gluon's, which not every Triton has

    if isinstance(plan, Int4RingPlan):
        words = workspace_of(device).words
        matmul_launch.launch_ring_int4(plan, x, weight, out, words, bias_N=bias_N, silu=silu)
    elif isinstance(plan, Int4RowPlan):
        matmul_launch.launch_rows_int4(plan, x, weight, out, bias_N=bias_N, silu=silu)
    elif isinstance(plan, RowsPlan):
        matmul_launch.launch_rows_scaled(plan, x, weight, out, bias_N=bias_N, silu=silu)
    else:
        assert x_scales is not None
        words, scales = workspace_of(device).words, (weight.scales, x_scales)
        matmul_launch.launch(plan, x, weight.values, out, words, bias_N=bias_N, silu=silu, scales=scales)
    return out


def _takes_scaled(x_MK: torch.Tensor | RoundedRows, weight: QuantisedWeight) -> bool:
    """Whether fp8 products serve: prompts, on a GPU that has them, a scale an output, sizes that they take."""
    if not is_fused(weight.values) or weight.bits != 8 or weight.group or x_MK.dtype != torch.bfloat16:
        return False
    return x_MK.shape[0] >= LEAST_SCALED_ROWS and _has_scaled(weight.shape, weight.values.device)


@functools.cache
def _has_scaled(shape: tuple[int, int], device: torch.device) -> bool:
    return _may_scale(shape) and torch.cuda.get_device_capability(device) >= (8, 9) and _scaled_is_right(device)


def _may_scale(shape: tuple[int, int]) -> bool:
    return not any(size % 16 for size in shape)


@functools.cache
def _scaled_is_right(device: torch.device) -> bool:
    """Tried in a graph, as decode steps run it."""
    x = product_trials.random_matrix(320, 512, torch.bfloat16, device, 1)
    weight = quantise_fp8(product_trials.random_matrix(256, 512, torch.float32, device, 2))
    values, scales = quantise_rows(x)

    def replayed() -> torch.Tensor:
        scaled_linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = scaled_linear(x, weight)
        graph.replay()
        return out.clone()

    return product_trials.passes(
        "the fp8 product of prompts",
        replayed,
        lambda: functional.linear(values.float() * scales, weight.dequantised(torch.float32)),
    )
