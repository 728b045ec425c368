"""Mixtures of experts under Triton's interpreter, against their eager twins. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels.experts.plans import FewPlan, GroupedPlan, MixturePlan, Routing
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
)


@pytest.mark.parametrize(("routing", "num_experts", "has_bias"), ROUTINGS)
def test_the_best_experts_are_chosen(routing: Routing, num_experts: int, has_bias: bool) -> None:
    torch.manual_seed(num_experts)
    logits = torch.randn(7, num_experts + 3)[:, :num_experts]
    bias = torch.rand(num_experts) if has_bias else None
    ids, weights = route_triton(
        logits, routing.top_k, sigmoid=routing.scores == "sigmoid", renormalise=routing.renormalises, bias_X=bias,
        groups=(routing.groups, routing.kept_groups), by_pairs=routing.by_pairs, factor=routing.factor,
        held=routing.held or (0, num_experts),
    )  # fmt: skip
    expected_ids, expected = twins.route(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
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


@pytest.mark.parametrize("plan", PLANS)
def test_a_mixture_is_what_its_experts_make(plan: MixturePlan) -> None:
    torch.manual_seed(3)
    gate_up, down = torch.randn(4, 64, 96) * 0.2, torch.randn(4, 96, 32) * 0.2
    x = torch.randn(21, 112)[:, :96]
    ids = torch.stack([torch.randperm(4)[:2] - 1 for _ in range(21)]).int()  # of -1 nothing is here
    weights = torch.rand(21, 2)
    made = launch(plan, x, ids, weights, gate_up, down)
    torch.testing.assert_close(made, twins.mixture(x, ids, weights, gate_up, down), rtol=1e-4, atol=1e-4)
    if isinstance(plan.gate_up, FewPlan):
        residual, gain = x.contiguous(), torch.rand(96) + 0.5
        made = launch(plan, residual.clone(), ids, weights, gate_up, down, (gain, 1e-5))
        normed = functional.rms_norm(residual, (96,), gain, 1e-5)
        expected = residual + twins.mixture(normed, ids, weights, gate_up, down)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
