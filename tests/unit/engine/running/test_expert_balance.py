"""How evenly experts are chosen: counted where they are chosen, read now and then."""

from __future__ import annotations

import pytest
import torch
from handmade_steps import make_runner, prompt_step
from tiny_hf_models import tiny_hf_model

from tandem.engine.running import expert_balance
from tandem.engine.running.expert_balance import ExpertBalance, make_expert_balance
from tandem.router.metrics.catalog import NODE_METRICS
from tiny_models import random_prompt, tiny_model

KEYS = {metric.key for metric in NODE_METRICS}


@pytest.fixture(autouse=True)
def _looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balance, "LOOKS_S", 0.0)


def looked(balance: ExpertBalance) -> dict[str, float]:
    """Its figures after another step."""
    balance.step_launched()
    balance.counters()  # a copy is sent for
    return dict(balance.counters())


def test_the_busiest_are_told_beside_the_mean() -> None:
    counts = torch.tensor([[100, 300, 100, 100], [200, 200, 200, 200]], dtype=torch.int32)
    balance = ExpertBalance(counts, [0, 2])
    assert [balance.counters() for _ in range(2)] == [{"expert_tokens": 0}] * 2, "no step ran"
    figures = looked(balance)
    assert figures == {
        "expert_tokens": 1400,
        "expert_imbalance": 1.5,
        "expert_imbalance_worst": 2.0,
        "expert_rank_imbalance": pytest.approx(7 / 6),
    }
    assert figures.keys() <= KEYS
    counts += 30
    assert looked(balance)["expert_tokens"] == 1400, "too few to say anything: they wait for more"
    counts += 70
    figures = looked(balance)
    assert figures["expert_tokens"] == 2200
    assert figures["expert_imbalance_worst"] == 1


def test_counts_may_wrap_around() -> None:
    counts = torch.full((1, 2), 2**31 - 1, dtype=torch.int32)
    balance = ExpertBalance(counts)
    before = looked(balance)["expert_tokens"]
    counts += torch.tensor([[100, 300]], dtype=torch.int32)
    assert int(counts.max()) < 0
    figures = looked(balance)
    assert figures["expert_tokens"] == before + 400
    assert figures["expert_imbalance"] == 1.5


@pytest.mark.parametrize(
    ("kind", "num_layers", "num_experts"), [("mixtral", 3, 6), ("qwen3_moe", 2, 6), ("deepseek_v2", 3, 8)]
)
def test_every_token_of_a_step_is_counted_and_nothing_else(
    kind: str, num_layers: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what warm-up computes nor padding, nor experts that all tokens take (DeepSeek). The last layer's tokens
    before a prompt's last aren't computed."""
    monkeypatch.setattr(expert_balance, "LEAST_MEAN", 1)
    runner = make_runner(tiny_hf_model(kind) if kind == "deepseek_v2" else tiny_model(kind))
    runner.warmup()
    counts = runner.model.expert_counts
    assert counts.shape == (num_layers, num_experts)
    assert not counts.any()
    runner.execute(prompt_step({0: random_prompt(33, seed=2)}, {0: (7, 3, 11)})).result()
    assert runner.counters["expert_tokens"] == 0
    assert runner.counters["expert_tokens"] == 2 * 33 * (num_layers - 1)
    assert counts.sum(1).tolist() == [66] * (num_layers - 1) + [0]


def test_a_model_without_experts_has_none() -> None:
    assert make_expert_balance(make_runner(tiny_model("llama")).model) is None
