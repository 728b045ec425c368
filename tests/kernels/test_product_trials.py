"""Kernels are tried before they serve. Eager twins stand for the kernels, right ones and wrong ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tandem.kernels.products import few_rows, matmul, product_trials
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP, Plan, RingPlan

CPU = torch.device("cpu")
PLAN = RingPlan(128, 64, 128, 4, 1)
LAYER = ((768, 512), (512, 512), (1024, 512), (512, 512))
Spoil = Callable[[torch.Tensor], torch.Tensor]


def raises(result: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def last_output_lost(result: torch.Tensor) -> torch.Tensor:
    result = result.clone()
    result[..., -1] = float("nan")
    return result


SPOILS = [raises, last_output_lost, lambda result: result * 1.02]


@pytest.fixture(autouse=True)
def _forget_trials() -> None:
    matmul._is_right.cache_clear()
    few_rows._are_right.cache_clear()


def test_rounding_passes_and_errors_do_not(caplog: pytest.LogCaptureFixture) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert product_trials.passes("a", lambda: values.bfloat16(), lambda: values)
    assert not caplog.records
    for spoil in SPOILS:
        with caplog.at_level(logging.WARNING):
            assert not product_trials.passes("the odd one", lambda s=spoil: s(values), lambda: values)
        assert "the odd one" in caplog.records[-1].message


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("spoil", [None, *SPOILS])
def test_a_wrong_product_is_not_taken(spoil: Spoil | None, silu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def twin(plan: Plan, x: torch.Tensor, weight: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        result = functional.linear(x, weight)
        result = silu_mul(result, GATE_UP_GROUP) if silu else result
        return result if spoil is None else spoil(result)

    monkeypatch.setattr(matmul, "run_plan", twin)
    assert matmul._is_right(PLAN, 256, torch.bfloat16, CPU, silu) == (spoil is None)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("wrong", ["", "norm", "silu", "adds"])
def test_a_layer_with_a_wrong_product_is_not_taken(wrong: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def twin(
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        silu: bool = False,
        **_: object,
    ) -> torch.Tensor:
        if norm is not None:
            gain, eps = norm
            x = functional.rms_norm(x, gain.shape, None if wrong == "norm" else gain, eps)
        result = functional.linear(x, weight)
        if silu:
            result = silu_mul(result, 2 * GATE_UP_GROUP if wrong == "silu" else GATE_UP_GROUP)
        if residual is None:
            return result
        return residual.copy_(result) if wrong == "adds" else residual.add_(result)

    monkeypatch.setattr(few_rows, "_launch", twin)
    assert few_rows._are_right(rows, LAYER, torch.bfloat16, CPU) == (wrong == "")
