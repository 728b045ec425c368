"""Mixtures of experts under Triton's interpreter, against their eager twins. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels.experts.plans import Clamp, FewPlan, GroupedPlan, MixturePlan, Routing
from tandem.kernels.experts.stacked import StackedWeight, empty_stacked, stacked_mxfp4
from tandem.kernels.experts.tally import Tally
from tandem.kernels.products.fused_ops import quantise_rows
from tandem.kernels.reference import experts as twins
from tandem.kernels.triton_kernels.experts import sort
from tandem.kernels.triton_kernels.experts.launch import launch
from tandem.kernels.triton_kernels.experts.route import route_triton

ROUTINGS = (
    (Routing(3, renormalises=False), 5, False),
    (Routing(8, renormalises=True), 128, False),
    (Routing(3, held=(2, 7)), 10, False),
    (Routing(2, scores="sigmoid", renormalises=True, factor=2.5), 16, True),
    (Routing(3, scores="sigmoid", groups=4, kept_groups=2, by_pairs=True, factor=1.5), 16, True),
    (Routing(2, renormalises=False, groups=2, kept_groups=1), 8, False),
    (Routing(3, renormalises=False, factor=2.0, shared=2), 10, False),
    (Routing(3, held=(2, 7), shared=2), 10, False),
)


@pytest.mark.parametrize(("routing", "num_experts", "has_bias"), ROUTINGS)
def test_the_best_experts_are_chosen(routing: Routing, num_experts: int, has_bias: bool) -> None:
    torch.manual_seed(num_experts)
    logits = torch.randn(7, num_experts + 3)[:, :num_experts]
    bias = torch.rand(num_experts) if has_bias else None
    counts, expected_counts = torch.zeros(2, num_experts, dtype=torch.int32)
    slots = torch.tensor([5, -1, 0, 3, 4, -1, 9])
    ids, weights = route_triton(
        logits, routing.top_k, sigmoid=routing.scores == "sigmoid", renormalise=routing.renormalises, bias_X=bias,
        groups=(routing.groups, routing.kept_groups), by_pairs=routing.by_pairs, factor=routing.factor,
        held=routing.held or (0, num_experts), shared=routing.shared, tally=Tally(counts, slots),
    )  # fmt: skip
    expected_ids, expected = twins.route(logits, routing, bias, Tally(expected_counts, slots))
    assert torch.equal(ids, expected_ids)
    assert torch.equal(counts, expected_counts)
    assert int(counts.sum()) == 5 * routing.top_k
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_rows_that_are_no_numbers_go_to_experts_all_the_same() -> None:
    logits = torch.randn(3, 5)
    logits[1] = torch.nan
    ids, _ = route_triton(
        logits, 2, sigmoid=False, renormalise=True, bias_X=None, groups=(1, 1), by_pairs=False, factor=1.0,
        held=(0, 5),
    )  # fmt: skip
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "tile_m"), [(1, 2, 5, 16), (90, 3, 7, 16), (700, 2, 9, 64)]
)
def test_pairs_are_sorted_and_cut(
    num_tokens: int, top_k: int, num_experts: int, tile_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "MANY_PAIRS", 512)  # so that few pairs are looked at in parts
    monkeypatch.setattr(sort, "FEW_PAIRS", 512)
    """Nobody takes the last expert; some take one that isn't here."""
    ids = torch.randint(-1, num_experts - 1, (num_tokens, top_k), dtype=torch.int32)
    order, tiles = sort.sort_triton(ids, num_experts, tile_m)
    here = ids[ids >= 0]
    assert torch.equal(order[: len(here)].long(), ids.flatten().argsort(stable=True)[-len(here) :])
    expected, first = [], 0
    for expert, count in enumerate(here.bincount(minlength=num_experts).tolist()):
        expected += [(expert, first + done, min(tile_m, count - done)) for done in range(0, count, tile_m)]
        first += count
    assert [tuple(tile[:3]) for tile in tiles.tolist() if tile[2]] == expected


PLANS = (
    MixturePlan(FewPlan(4, 32, 4), FewPlan(8, 16, 4)),
    MixturePlan(GroupedPlan(16, 16, 32, 2, 4), GroupedPlan(32, 16, 16, 2, 4)),
    MixturePlan(GroupedPlan(32, 64, 32, 2, 4), GroupedPlan(32, 64, 32, 2, 4)),
)
ROUNDED = MixturePlan(GroupedPlan(64, 16, 32, 2, 4), GroupedPlan(64, 16, 32, 2, 4), rounded=True)


@pytest.mark.parametrize("plan", PLANS)
def test_a_mixture_is_what_its_experts_make(plan: MixturePlan) -> None:
    torch.manual_seed(3)
    num_tokens = 4 if isinstance(plan.gate_up, FewPlan) else 21
    gate_up, down = torch.randn(4, 64, 96) * 0.2, torch.randn(4, 96, 32) * 0.2
    x = torch.randn(num_tokens, 112)[:, :96]
    ids = torch.stack([torch.randperm(4)[:2] - 1 for _ in range(num_tokens)]).int()  # of -1 nothing is here
    weights = torch.rand(num_tokens, 2)
    made = launch(plan, x, ids, weights, gate_up, down)
    torch.testing.assert_close(made, twins.mixture(x, ids, weights, gate_up, down), rtol=1e-4, atol=1e-4)
    if isinstance(plan.gate_up, FewPlan):
        residual, gain = x.contiguous(), torch.rand(96) + 0.5
        made = launch(plan, residual.clone(), ids, weights, gate_up, down, (gain, 1e-5))
        normed = functional.rms_norm(residual, (96,), gain, 1e-5)
        expected = residual + twins.mixture(normed, ids, weights, gate_up, down)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def in_e4m3(num_outputs: int, num_inputs: int, group: int) -> StackedWeight:
    """Of four experts. Every scale is another."""
    made = empty_stacked(4, num_outputs, num_inputs, group, "cpu")
    made.values.copy_(torch.randn(made.values.shape))
    made.scales.copy_(0.1 + torch.arange(made.scales.numel()).view(made.scales.shape) % 37 / 100)
    return made


@pytest.mark.parametrize(
    ("plan", "group"),
    [(PLANS[0], 0), (PLANS[0], 32), (PLANS[0], 64), (PLANS[1], 0), (PLANS[1], 32), (ROUNDED, 0), (ROUNDED, 32)],
)
def test_a_mixture_of_e4m3_is_what_its_dequantised_experts_make(plan: MixturePlan, group: int) -> None:
    """Of one row's tiles have two groups or a part of one."""
    torch.manual_seed(4)
    if isinstance(plan.gate_up, FewPlan):
        plan = MixturePlan(FewPlan(16, 64, 4), FewPlan(32, 64 if group == 32 else 16, 4))
    gate_up, down = in_e4m3(128, 128, group), in_e4m3(128, 64, group)
    x = torch.randn(5, 128)
    ids = torch.stack([torch.randperm(4)[:2] - 1 for _ in range(5)]).int()
    weights = torch.rand(5, 2)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        values, scales = quantise_rows(rows)
        return values.float() * scales

    made = launch(plan, x, ids, weights, gate_up, down)
    expected = twins.mixture(x, ids, weights, gate_up, down, *((rounded,) if plan.rounded else ()))
    error = (made - expected).norm() / expected.norm()
    assert error < (2e-2 if plan.rounded else 1e-6), error
    if isinstance(plan.gate_up, FewPlan):
        gain = torch.rand(128) + 0.5
        made = launch(plan, x.clone(), ids, weights, gate_up, down, (gain, 1e-5))
        expected = x + twins.mixture(functional.rms_norm(x, (128,), gain, 1e-5), ids, weights, gate_up, down)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [0, 64])
def test_a_mixture_of_integers_of_four_bits_is_what_its_dequantised_experts_make(group: int) -> None:
    torch.manual_seed(6)

    def stack(num_outputs: int, num_inputs: int) -> StackedWeight:
        made = empty_stacked(4, num_outputs, num_inputs, group, "cpu", torch.float16)
        assert made.zeros is not None
        made.values.random_(256)
        made.scales.copy_(0.01 + torch.arange(made.scales.numel()).view(made.scales.shape) % 37 / 1000)
        made.zeros.copy_(torch.randint(0, 16, made.zeros.shape))
        return made

    gate_up, down = stack(128, 128), stack(128, 64)
    x, weights = torch.randn(5, 128) / 4, torch.rand(5, 2)
    ids = torch.stack([torch.randperm(4)[:2] - 1 for _ in range(5)]).int()
    product = GroupedPlan(32, 16, 32, 2, 4)
    made = launch(MixturePlan(product, product), x, ids, weights, gate_up, down)
    torch.testing.assert_close(made, twins.mixture(x, ids, weights, gate_up, down), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("product", [GroupedPlan(32, 16, 32, 2, 4), GroupedPlan(32, 16, 128, 2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_e2m1_with_biases_is_what_its_dequantised_experts_make(
    product: GroupedPlan, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)

    def stack(num_outputs: int, num_inputs: int) -> StackedWeight:
        codes = torch.randint(0, 16, (4, num_outputs, num_inputs), dtype=torch.uint8)
        exponents = torch.randint(120, 129, (4, num_outputs, num_inputs // 32), dtype=torch.uint8)
        return stacked_mxfp4(codes, exponents, torch.randn(4, num_outputs))

    gate_up, down, clamp = stack(128, 160), stack(160, 64), Clamp(1.702, 7.0)
    x, weights = (torch.randn(5, 160) / 40).to(dtype), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(4)[:2] - 1 for _ in range(5)]).int()
    assert (ids < 0).any()
    made = launch(MixturePlan(product, product), x, ids, weights, gate_up, down, clamp=clamp)
    expected = twins.mixture(x.float(), ids, weights, gate_up, down, clamp=clamp)
    if dtype == torch.float32:
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    else:
        assert made.dtype == dtype
        assert (made - expected).norm() < 1e-2 * expected.norm()
    unclamped = twins.mixture(x.float(), ids, weights, gate_up, down)
    assert (unclamped - expected).norm() > 0.1 * expected.norm()
