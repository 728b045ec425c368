"""Tables made on this device: a short run measures, keeps and uses plans, and the next process would find them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_checks import ON_HOPPER, relative_error

from tandem.engine.running.at_start.products import warm_up_tuned
from tandem.kernels.products import matmul, matmul_device
from tandem.kernels.products.matmul_plans import RowsPlan
from tandem.kernels.products.tuning import run, stored
from tandem.kernels.products.tuning.candidates import SHORT_LADDER, Product
from tandem.kernels.products.tuning.measured import DeviceMeasures

pytestmark = ON_HOPPER
DEVICE = torch.device("cuda", 0)
SIZES = (5120, 3072)  # of no shipped table


@pytest.fixture(autouse=True)
def no_table_but_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matmul_device.asked_of.cache_clear()
    matmul.read_tables_anew()
    yield
    monkeypatch.undo()
    matmul_device.asked_of.cache_clear()
    matmul.read_tables_anew()


class Runner:
    """A model of one product."""

    device = DEVICE

    def __init__(self) -> None:
        self.weight = (torch.randn(SIZES, device=DEVICE) * 0.05).bfloat16()
        self.warmed = 0

    def step(self, rows: int) -> None:
        x = torch.randn(rows, SIZES[1], device=DEVICE).bfloat16()
        assert relative_error(matmul.linear(x, self.weight), x.double() @ self.weight.double().t()) < 4e-3

    def warmup(self) -> None:
        matmul.prepare(DEVICE)
        self.warmed += 1
        for rows in (*SHORT_LADDER, 3, 100):
            self.step(rows)


def test_a_start_measures_what_no_table_has_and_the_next_finds_it() -> None:
    runner, said = Runner(), []
    assert matmul.chosen_plan(1, *SIZES, DEVICE) == RowsPlan(2, 1024, 4), "the rule serves at once"
    warm_up_tuned(runner, 300.0, said.append)
    assert (runner.warmed, said) == (2, ["measuring matrix products"])
    steps = matmul_device.table_of(DEVICE)[SIZES]
    assert tuple(rows for rows, _ in steps) == SHORT_LADDER
    assert matmul.chosen_plan(1, *SIZES, DEVICE) == steps[0][1]
    assert matmul.chosen_plan(5, *SIZES, DEVICE) == steps[1][1]
    matmul_device.asked_of.cache_clear()  # as a new process
    matmul.read_tables_anew()
    again = Runner()
    warm_up_tuned(again, 300.0, said.append)
    assert (again.warmed, len(said)) == (1, 1)


def test_no_time_changes_nothing() -> None:
    runner = Runner()
    runner.warmup()
    assert not run.tune_missing(DEVICE, 0.0)
    assert stored.load_made(stored.key_of(DEVICE)) == {}
    warm_up_tuned(runner, 0.0, pytest.fail)


def test_a_table_of_other_kernels_is_not_taken() -> None:
    key = stored.key_of(DEVICE)
    stored.store_made(key._replace(kernels="older"), {SIZES: ((1, None),)})
    matmul.read_tables_anew()
    assert SIZES not in matmul_device.table_of(DEVICE)


def test_times_are_those_of_reading_the_weights() -> None:
    """Faster than any memory would be the cache, a tenth of it the host's launches."""
    measures, product = DeviceMeasures(DEVICE), Product(14336, 4096)
    plans = (None, RowsPlan(2, 2048, 4))
    for seconds in (measures.seconds(1, product, plan) for plan in plans):
        assert seconds is not None
        assert 0.4e12 < product.outputs * product.inputs * 2 / seconds < 8e12
    assert measures.seconds(1, product, RowsPlan(2, 3000, 4)) is None, "no plan of whole tiles"


def test_every_plan_is_measured_by_a_command() -> None:
    told: list[int] = []
    found = run.tune_products(DEVICE, [Product(*SIZES)], (1,), 300.0, 2, lambda rows, *_: told.append(rows))
    assert (told, found.left) == ([1], 0)
    assert len(found.times[1, Product(*SIZES)]) > 4
