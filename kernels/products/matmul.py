"""Matrix products of decode steps: y = x @ weight^T for 1 to 320 rows, by our Hopper kernel where it beats cuBLAS.

M rows, N outputs, K inputs, G = 2 * intermediate size of a gated MLP. Which kernel runs is one pure function
(matmul_plans.choose_plan) of the sizes over a table measured on such a device, shipped in `tuned/` or made here
(tuning/); sizes that it lacks take the plans of a device like this one, and what no table names is torch's. Products
are deterministic: parts of a sum are added in a fixed order.

Products launched one after another overlap: a kernel fetches weights before its predecessor has ended. So no kernel
may write a weight on the stream just before its use, except one that itself doesn't let successors start early
(torch's kernels and copies don't).
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from tandem.kernels.products import few_rows, product_trials, quantised
from tandem.kernels.products.fused_ops import is_fused, silu_mul
from tandem.kernels.products.matmul_device import asked_of, is_hopper, table_of, tables_of, workspace_of
from tandem.kernels.products.matmul_plans import (
    GATE_UP_GROUP,
    LEAST_ADDED_ROWS,
    LEAST_PROMPT_ROWS,
    LONGEST_TUNED,
    PROMPT_PLAN,
    Plan,
    RingPlan,
    StreamPlan,
    choose_plan,
    is_measured,
    prompt_slices,
)
from tandem.kernels.products.quantised import RoundedRows
from tandem.kernels.products.quantised_weight import QuantisedWeight
from tandem.kernels.products.tuning.candidates import Product

__all__ = [
    "GATE_UP_GROUP", "LONGEST_TUNED", "can_start_late", "chosen_plan", "group_gate_up", "linear", "linear_onto",
    "linear_silu_mul", "prepare", "read_tables_anew", "run_plan", "table_of",
]  # fmt: skip


def linear(
    x_MK: torch.Tensor | RoundedRows,
    weight_NK: torch.Tensor | QuantisedWeight,
    bias_N: torch.Tensor | None = None,
    out_MN: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """x @ weight^T + bias, summed in fp32, as torch.nn.functional.linear. Allocates `out_MN` alone, when not given, and
    for quantised weights, which alone take rounded rows, whatever quantised.py needs. `late`, where the product
    `can_start_late`: the next kernel runs beside this one and finds complete what came before it, without a wait; only
    waiting shows it this one's end."""
    if isinstance(weight_NK, QuantisedWeight):
        return _into(out_MN, quantised.linear(x_MK, weight_NK, bias_N))
    assert isinstance(x_MK, torch.Tensor)
    plan = _plan(x_MK, weight_NK, silu=False)
    if plan is None or not _is_aligned(x_MK, weight_NK, out_MN):
        assert not late, "only products of ours let the next kernel run beside them"
        if out_MN is not None and bias_N is None:
            return torch.mm(x_MK, weight_NK.t(), out=out_MN)
        return _into(out_MN, functional.linear(x_MK, weight_NK, bias_N))
    return _by_plan(plan, x_MK, weight_NK, bias_N, out_MN, silu=False, late=late)


def can_start_late(x_MK: torch.Tensor, weight_NK: torch.Tensor | QuantisedWeight) -> bool:
    """Whether `linear` of these, without an `out_MN`, takes `late`."""
    if isinstance(weight_NK, QuantisedWeight):
        return False
    plan = _plan(x_MK, weight_NK, silu=False)
    return isinstance(plan, StreamPlan | RingPlan) and _is_aligned(x_MK, weight_NK, None)


def linear_silu_mul(
    x_MK: torch.Tensor | RoundedRows, grouped_GK: torch.Tensor | QuantisedWeight, out_MI: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(x @ gate^T) * (x @ up^T) -> [M, G / 2], for weights laid out by `group_gate_up`."""
    if isinstance(grouped_GK, QuantisedWeight):
        return _into(out_MI, quantised.linear(x_MK, grouped_GK, silu=True))
    assert isinstance(x_MK, torch.Tensor)
    plan = _plan(x_MK, grouped_GK, silu=True)
    if plan is not None and _is_aligned(x_MK, grouped_GK, out_MI) and grouped_GK.shape[0] % 16 == 0:
        return _by_plan(plan, x_MK, grouped_GK, None, out_MI, silu=True)
    slices = _prompt_slices(x_MK, grouped_GK)
    if slices and _is_aligned(x_MK, grouped_GK, out_MI):
        return _in_slices(slices, x_MK, grouped_GK, out_MI)
    return _into(out_MI, silu_mul(functional.linear(x_MK, grouped_GK), GATE_UP_GROUP))


def linear_onto(
    residual_MN: torch.Tensor, x_MK: torch.Tensor | RoundedRows, weight_NK: torch.Tensor | QuantisedWeight
) -> bool:
    """residual += x @ weight^T by the product itself, rounded once: for as many rows as prompts have, and for weights
    in 16 bits. False: nothing was done."""
    if isinstance(x_MK, RoundedRows) or isinstance(weight_NK, QuantisedWeight):
        return False
    if not _has_many_rows(x_MK, weight_NK, LEAST_ADDED_ROWS):
        return False
    torch.addmm(residual_MN, x_MK, weight_NK.t(), out=residual_MN)
    return True


def group_gate_up(gate_up_GK: torch.Tensor) -> torch.Tensor:
    """[gate; up] stacked along rows -> rows in groups: 8 of gate, the same 8 of up, the next 8 of gate, ...

    A new tensor; works for biases [G] too. Raises ValueError unless the intermediate size is a multiple of 8."""
    half, odd = divmod(gate_up_GK.shape[0], 2)
    if odd or half % GATE_UP_GROUP:
        raise ValueError(f"{gate_up_GK.shape[0]} rows of gate and up: need a multiple of {2 * GATE_UP_GROUP}")
    halves = gate_up_GK.view(2, half // GATE_UP_GROUP, GATE_UP_GROUP, *gate_up_GK.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up_GK.shape)


def prepare(device: torch.device | str) -> None:
    """Makes the device's workspace and reads its tables: once, before graphs are captured."""
    device = torch.device(device)
    quantised.prepare(device)
    tables_of(device)


def read_tables_anew() -> None:
    """Has products from here on take what the tables say now. What a graph has captured stays as it was."""
    tables_of.cache_clear()
    chosen_plan.cache_clear()


def run_plan(
    plan: Plan, x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor | None = None, *, silu: bool = False
) -> torch.Tensor:
    """The product by a given plan, whatever the table says: for tuning and tests. Needs a Hopper GPU."""
    return _by_plan(plan, x_MK, weight_NK, None, out_MN, silu=silu)


@functools.lru_cache(maxsize=4096)
def chosen_plan(rows: int, outputs: int, inputs: int, device: torch.device, silu: bool = False) -> Plan | None:
    """What serves a product of 16 bits; None: torch."""
    if not is_hopper(device):
        return None
    asked_of(device).add(Product(outputs, inputs, silu))
    tables = tables_of(device)
    for table in (tables.measured, tables.like):
        if is_measured(table, rows, outputs, inputs):
            return choose_plan(table, rows, outputs, inputs)
    return few_rows.plan_for(rows, outputs, inputs) if rows == 1 else None  # what a layer of few rows would take


def _are_half(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether kernels serve them, and both are in the same 16 bits."""
    if not is_fused(x_MK) or x_MK.dim() != 2:
        return False
    return x_MK.dtype in (torch.bfloat16, torch.float16) and weight_NK.dtype == x_MK.dtype


def _has_many_rows(x_MK: torch.Tensor, weight_NK: torch.Tensor, least: int) -> bool:
    """Whether these are at least so many rows in 16 bits on Hopper."""
    return _are_half(x_MK, weight_NK) and x_MK.shape[0] >= least and is_hopper(x_MK.device)


def _prompt_slices(x_MK: torch.Tensor, grouped_GK: torch.Tensor) -> list[slice]:
    """`prompt_slices` of these; none, too, where `PROMPT_PLAN` doesn't run or was wrong. It is tried before it is asked
    whether it pays, since the first step that it serves may be one that is captured."""
    if not _has_many_rows(x_MK, grouped_GK, LEAST_PROMPT_ROWS):
        return []
    if not _is_right(PROMPT_PLAN, grouped_GK.shape[1], x_MK.dtype, x_MK.device, silu=True):
        return []
    return prompt_slices(x_MK.shape[0], grouped_GK.shape[0])


def _in_slices(
    slices: list[slice], x_MK: torch.Tensor, grouped_GK: torch.Tensor, out_MI: torch.Tensor | None
) -> torch.Tensor:
    if out_MI is None:
        out_MI = x_MK.new_empty((x_MK.shape[0], grouped_GK.shape[0] // 2))
    for rows in slices:
        _by_plan(PROMPT_PLAN, x_MK[rows], grouped_GK, None, out_MI[rows], silu=True)
    return out_MI


def _plan(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, silu: bool) -> Plan | None:
    if not _are_half(x_MK, weight_NK) or x_MK.shape[0] > LONGEST_TUNED:
        return None
    plan = chosen_plan(x_MK.shape[0], weight_NK.shape[0], weight_NK.shape[1], x_MK.device, silu)
    if isinstance(plan, RingPlan) and not _is_right(plan, weight_NK.shape[1], x_MK.dtype, x_MK.device, silu):
        return None
    return plan


@functools.cache
def _is_right(plan: RingPlan, num_inputs: int, dtype: torch.dtype, device: torch.device, silu: bool) -> bool:
    """Tried on some tiles and a part of one, with a row less than a tile's."""
    x = product_trials.random_matrix(max(1, plan.tile_m - 1), num_inputs, dtype, device, 1)
    weight = product_trials.random_matrix(4 * plan.tile_n + plan.tile_n // 2, num_inputs, dtype, device, 2)

    def expected() -> torch.Tensor:
        product = functional.linear(x, weight)
        return silu_mul(product, GATE_UP_GROUP) if silu else product

    return product_trials.passes(f"the product by {plan}", lambda: run_plan(plan, x, weight, silu=silu), expected)


def _is_aligned_matrix(matrix: torch.Tensor) -> bool:
    """What the tensor memory accelerator can address: contiguous rows that start at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0


def _is_aligned(x_MK: torch.Tensor, weight_NK: torch.Tensor, out: torch.Tensor | None) -> bool:
    aligned = _is_aligned_matrix(x_MK) and _is_aligned_matrix(weight_NK) and weight_NK.shape[0] % 8 == 0
    return aligned and (out is None or _is_aligned_matrix(out))


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def _by_plan(
    plan: Plan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    silu: bool,
    late: bool = False,
) -> torch.Tensor:
    from tandem.kernels.triton_kernels.products.matmul_launch import launch

    num_rows, num_outputs = x_MK.shape[0], weight_NK.shape[0] // (2 if silu else 1)
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x_MK.dtype, device=x_MK.device)
    launch(plan, x_MK, weight_NK, out, workspace_of(x_MK.device).words, bias_N=bias_N, silu=silu, late=late)
    return out
