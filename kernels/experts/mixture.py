"""What a mixture of experts computes once experts are chosen: down(silu(gate) * up) of each token's experts, weighted
and added up. docs/mixtures_of_experts.md.

T tokens, k experts of each, X experts, E hidden size, F width of an expert, G = 2 F. On a GPU nothing asks the host
and every shape follows from T, so that steps are captured; sums are taken in fp32 in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.nn import functional

from tandem.kernels.experts.plans import (
    NOT_HERE,
    Clamp,
    GluonType,
    MixturePlan,
    MixtureSizes,
    choose_plan,
    every_plan,
    few_plan,
)
from tandem.kernels.experts.stacked import StackedWeight, empty_stacked, stacked_mxfp4
from tandem.kernels.products import product_trials
from tandem.kernels.products.fused_ops import is_fused, quantise_rows
from tandem.kernels.products.matmul_device import is_hopper
from tandem.kernels.reference import experts as twins

TRIAL_EXPERTS = 3  # a guess
ROUNDED_TOLERANCE = 3e-2  # two numbers that hardly differ may be rounded apart, by an eighth; a guess
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GLUON_TYPES: dict[torch.dtype, GluonType] = {torch.bfloat16: "bf16", torch.float16: "fp16"}

Stack = torch.Tensor | StackedWeight  # all experts' matrices


def mixture(
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: Stack,
    down_XEF: Stack,
    clamp: Clamp | None = None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """[T, E] of x's type. `ids_Tk` int32 and `weights_Tk` fp32: each token's experts, and how much each of them counts.
    Matrices are [X, 2 F, E], gate's outputs before up's, and [X, E, F]. NOT_HERE among the ids adds nothing;
    `num_experts` is then how many there are, here and elsewhere. `clamp`: GPT-OSS's gate in place of SiLU."""
    if not serves(x_TE, ids_Tk, gate_up_XGE, down_XEF, clamp):
        return twins.mixture(x_TE, ids_Tk, weights_Tk, gate_up_XGE, down_XEF, clamp=clamp)
    plan = choose_plan(len(x_TE), _sizes(x_TE, ids_Tk, gate_up_XGE, down_XEF, clamp), num_experts)
    assert plan is not None
    return run_plan(plan, x_TE, ids_Tk, weights_Tk, gate_up_XGE, down_XEF, clamp=clamp)


def add_mixture(
    residual_TE: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: Stack,
    down_XEF: Stack,
) -> None:
    """residual += the mixture of the residual normalised, in place and in two launches, for as few tokens as
    `takes_few` says. `norm`: gain [E] and epsilon; statistics and result in fp32."""
    plan = few_plan(_sizes(residual_TE, ids_Tk, gate_up_XGE, down_XEF))
    assert plan is not None, "ask `takes_few` first"
    run_plan(plan, residual_TE, ids_Tk, weights_Tk, gate_up_XGE, down_XEF, norm)


def takes_few(x_TE: torch.Tensor, top_k: int, gate_up_XGE: Stack, down_XEF: Stack) -> bool:
    """Whether `add_mixture` serves up to MOST_FEW_TOKENS tokens like these over these matrices."""
    ids = torch.zeros(1, top_k, dtype=torch.int32, device=x_TE.device)
    return few_plan(_sizes(x_TE, ids, gate_up_XGE, down_XEF)) is not None and serves(x_TE, ids, gate_up_XGE, down_XEF)


def serves(
    x_TE: torch.Tensor, ids_Tk: torch.Tensor, gate_up_XGE: Stack, down_XEF: Stack, clamp: Clamp | None = None
) -> bool:
    """Whether the kernels serve, for any number of tokens. When first asked for such matrices all kernels that a number
    of tokens may take are compiled and tried, which can't be while a graph is captured: RuntimeError."""
    if not is_fused(x_TE) or not len(x_TE) or x_TE.dtype not in DTYPES:
        return False
    values = [each.values if isinstance(each, StackedWeight) else each for each in (gate_up_XGE, down_XEF)]
    sizes = _sizes(x_TE, ids_Tk, gate_up_XGE, down_XEF, clamp)
    if sizes.bits:
        # e4m3 came with 8.9, products of two numbers in bf16 with 8.0; fp16 is too narrow for powers of two, and
        # integers become 16 bit.
        least, no_type = (8, 9) if sizes.bits == 8 else (8, 0), torch.float16 if sizes.is_e2m1 else torch.float32
        if torch.cuda.get_device_capability(x_TE.device) < least or (sizes.bits == 4 and x_TE.dtype == no_type):
            return False
    elif any(each.dtype != x_TE.dtype for each in values):
        return False
    scale_dtype = down_XEF.scales.dtype if isinstance(down_XEF, StackedWeight) else x_TE.dtype
    return _are_aligned(x_TE, *values) and _are_right(sizes, x_TE.dtype, scale_dtype, x_TE.device)


def run_plan(
    plan: MixturePlan,
    x_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    gate_up_XGE: Stack,
    down_XEF: Stack,
    norm: tuple[torch.Tensor, float] | None = None,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """The mixture by a given plan: for tuning and tests. `norm`: as `add_mixture`, by a few rows' plan. Needs a GPU."""
    from tandem.kernels.triton_kernels.experts.launch import launch

    return launch(plan, x_TE, ids_Tk.contiguous(), weights_Tk.float().contiguous(), gate_up_XGE, down_XEF, norm, clamp)


def _sizes(
    x_TE: torch.Tensor, ids_Tk: torch.Tensor, gate_up_XGE: Stack, down_XEF: Stack, clamp: Clamp | None = None
) -> MixtureSizes:
    num_experts, hidden, width = down_XEF.shape
    gluon: GluonType = GLUON_TYPES.get(x_TE.dtype, "") if is_hopper(x_TE.device) else ""
    sizes = MixtureSizes(num_experts, ids_Tk.shape[1], hidden, width, x_TE.element_size(), clamp=clamp)
    if isinstance(down_XEF, StackedWeight):
        has_bias, is_e2m1 = down_XEF.bias is not None, down_XEF.is_e2m1
        return sizes._replace(bits=down_XEF.bits, is_e2m1=is_e2m1, group=down_XEF.group, has_bias=has_bias, gluon=gluon)
    # Matrices of experts in 16 bits are loaded as if they were one.
    are_one = all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in (gate_up_XGE, down_XEF))
    return sizes._replace(gluon=gluon if are_one else "")


def _are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 elements."""
    return all(
        each.stride(-1) == 1 and each.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in each.stride()[:-1])
        for each in tensors
    )


@functools.cache
def _are_right(sizes: MixtureSizes, dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether every plan computes what the twin does. Each is tried with some rows on a few experts, of which one is
    chosen by none; the experts of some pairs aren't here."""
    plans = every_plan(sizes)
    if not plans or choose_plan(1 << 20, sizes) is None:
        return False
    few = min(TRIAL_EXPERTS, sizes.num_experts)
    gate_up = _random_stack(few, 2 * sizes.width, sizes.hidden, sizes, dtype, scale_dtype, device, 1)
    down = _random_stack(few, sizes.hidden, sizes.width, sizes, dtype, scale_dtype, device, 2)
    x = product_trials.random_matrix(19, sizes.hidden, dtype, device, 3) * 20
    pairs = torch.arange(19 * sizes.top_k, dtype=torch.int32, device=device).view(19, -1)
    ids = torch.where(pairs % 5 == 4, NOT_HERE, pairs % max(1, few - 1))
    weights = torch.rand(ids.shape, device=device) + 0.5
    gain = 1 + x[0] / 8
    exact = torch.float32 if sizes.bits else dtype  # in which the twin computes

    def added() -> torch.Tensor:
        few_rows = x.clone()
        add_mixture(few_rows, (gain, 1e-6), ids, weights, gate_up, down)
        return few_rows

    def expected_sum() -> torch.Tensor:
        normed = functional.rms_norm(x.to(exact), (sizes.hidden,), gain.to(exact), 1e-6)
        return x + twins.mixture(normed, ids, weights, gate_up, down)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        values, scales = quantise_rows(rows.to(dtype))
        return values.float() * scales

    def expected(plan: MixturePlan) -> torch.Tensor:
        more = {"rounded": rounded} if plan.rounded else {}
        return twins.mixture(x.to(exact), ids, weights, gate_up, down, clamp=sizes.clamp, **more)

    if few_plan(sizes) is not None and not product_trials.passes("a mixture of experts, added", added, expected_sum):
        return False
    return all(
        product_trials.passes(
            f"a mixture of experts by {plan}",
            functools.partial(run_plan, plan, x, ids, weights, gate_up, down, clamp=sizes.clamp),
            functools.partial(expected, plan),
            ROUNDED_TOLERANCE if plan.rounded else product_trials.TOLERANCE,
        )
        for plan in plans
    )


def _random_stack(
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    sizes: MixtureSizes,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Stack:
    """Matrices as those of a mixture of these sizes are stored. Scales differ by output and group."""
    matrix = product_trials.random_matrix(num_experts * num_outputs, num_inputs, dtype, device, seed)
    stack = matrix.view(num_experts, num_outputs, num_inputs)
    if not sizes.bits:
        return stack
    bias = stack[:, :, 0].contiguous() if sizes.has_bias else None
    if sizes.is_e2m1:
        codes = torch.arange(stack.numel(), device=device, dtype=torch.int32).view(stack.shape)
        exponents = 117 + codes[:, :, : num_inputs // sizes.group] % 5
        return stacked_mxfp4((codes * 7 % 31 % 16).to(torch.uint8), exponents.to(torch.uint8), bias)
    int4_scales = scale_dtype if sizes.bits == 4 else None
    made = empty_stacked(num_experts, num_outputs, num_inputs, sizes.group, device, int4_scales)
    made.scales.uniform_(0.5, 1.5)
    if made.zeros is None:
        made.values.copy_(stack)
    else:
        made.scales.div_(64)
        made.zeros.copy_(torch.arange(made.zeros.numel(), device=device).view(made.zeros.shape) % 16)
        made.values.copy_(torch.arange(made.values.numel(), device=device).view(made.values.shape) * 7 % 251)
    return replace(made, bias=bias)
