"""Tuning runs by made-up times: what is measured, in which time, what is chosen, which files are taken for a table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tandem.kernels.products.matmul_plans import Plan, RingPlan, RowsPlan, StreamPlan, Table, parse_table
from tandem.kernels.products.tuning import stored
from tandem.kernels.products.tuning.candidates import (
    LADDER,
    SHORT_LADDER,
    Product,
    candidates,
    few_candidates,
    kernel_of,
    wanted,
)
from tandem.kernels.products.tuning.table_file import TableKey, device_of, made_table, merged, table_text
from tandem.kernels.products.tuning.tuner import picked, tune

KEY = TableKey("NVIDIA H100 80GB HBM3", 132, "2.11.0", "3.6.0", "abc")
ROWS, RING, STREAM = RowsPlan(2, 2048, 4), RingPlan(64, 64, 128, 6, 1), StreamPlan(64, 8, 256, 6, 4, 132)
TABLE: Table = {(4096, 4096): ((1, ROWS), (8, STREAM), (40, None), (64, RING))}
WIDE, GATED = Product(6144, 4096), Product(28672, 4096, True)


class Measures:
    """Times by plan, of which each takes a second of the clock; None: broken."""

    def __init__(self, times: dict[Plan | None, float | None]) -> None:
        self.now, self._times = 0.0, times
        self.asked: list[tuple[int, Product]] = []

    def seconds(self, rows: int, product: Product, plan: Plan | None) -> float | None:
        self.now += 1
        self.asked.append((rows, product))
        return self._times[plan]

    def clock(self) -> float:
        return self.now


# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
@pytest.mark.parametrize("product", [WIDE, GATED, Product(4096, 14336), Product(128256, 4096)])
def test_candidates_fit_the_device(product: Product, multiprocessors: int) -> None:
    for rows in LADDER:
        plans = candidates(rows, product, multiprocessors)
        assert plans
        for plan in plans:
            assert plan.is_valid(rows, *product[:2])
            if isinstance(plan, StreamPlan):  # whose programs wait for each other
                assert plan.grid(rows, *product[:2]) <= 2 * multiprocessors


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_start_measures_few_plans_of_the_kernels_that_its_devices_table_names(device: str) -> None:
    shipped = stored.tables_to_try(device, 132)
    assert len(shipped) == 1
    assert len(stored.tables_to_try("NVIDIA H800", 132)) == 2
    for product in (WIDE, GATED, Product(5120, 5120)):
        for rows in SHORT_LADDER:
            few, every = few_candidates(rows, product, shipped), candidates(rows, product)
            assert set(few) < set(every)
            assert len({kernel_of(plan, rows, product) for plan in few}) <= 8
        assert few_candidates(1, product, [])[0] == RowsPlan(2, product.inputs % 2048 or 2048, 4)


def test_few_rows_of_every_product_come_first() -> None:
    made: Table = {WIDE[:2]: ((1, ROWS),)}
    shipped: Table = {(4096, 4096): ()}
    todo = wanted([WIDE, Product(4096, 4096), GATED, GATED._replace(gated=False)], (8, 1), shipped, made)
    assert todo == [(1, GATED), (8, GATED), (8, WIDE)]


# --- the time ------------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_time_and_keeps_whole_choices_alone() -> None:
    measures = Measures({None: 2.0, ROWS: 1.0, RING: 3.0})
    todo = [(1, WIDE), (1, GATED), (8, WIDE)]
    found = tune(todo, lambda *_: [ROWS, RING], measures, 5.0, measures.clock)
    assert len(measures.asked) == 5
    assert found.times == {(1, WIDE): {None: 2.0, ROWS: 1.0, RING: 3.0}}
    assert found.left == 2
    assert found.table == {WIDE[:2]: ((1, ROWS),)}
    assert tune(todo, lambda *_: [ROWS, RING], measures, 100.0, measures.clock).left == 0


def test_no_time_measures_nothing() -> None:
    measures = Measures({})
    assert tune([(1, WIDE)], lambda *_: [ROWS], measures, 0.0, measures.clock).left == 1
    assert not measures.asked


def test_what_fails_is_not_chosen() -> None:
    measures = Measures({None: 2.0, ROWS: None, RING: 1.0})
    assert tune([(64, WIDE)], lambda *_: [ROWS, RING], measures, 9.0, measures.clock).table == {WIDE[:2]: ((64, RING),)}
    without_torch = Measures({None: None, RING: 1.0})
    found = tune([(64, WIDE)], lambda *_: [RING], without_torch, 9.0, without_torch.clock)
    assert (found.table, found.left, len(without_torch.asked)) == ({}, 0, 1)


def test_the_table_gets_what_beats_torch_by_shared_kernels_where_they_are_near() -> None:
    other = ROWS._replace(warps=8)
    times = {
        (1, WIDE): {None: 2.0, ROWS: 1.01, other: 1.0},
        (2, WIDE): {None: 2.0, ROWS: 1.0},
        (4, WIDE): {None: 1.0, ROWS: 0.99},
        (1, GATED): {None: 1.0},
    }
    assert picked(times) == {WIDE[:2]: ((1, ROWS), (2, ROWS), (4, None)), GATED[:2]: ((1, None),)}


# --- files ---------------------------------------------------------------------------------------------------


def test_a_made_table_is_read_for_what_it_was_made_for_alone() -> None:
    text = table_text(KEY, TABLE)
    assert made_table(text, KEY) == TABLE == parse_table(text)
    assert device_of(text) == KEY[:2]
    for name in KEY._fields:
        other = KEY._replace(**{name: 78 if name == "multiprocessors" else "other"})
        assert other.file_name != KEY.file_name
        with pytest.raises(ValueError, match=f"its {name} is"):
            made_table(text, other)


@pytest.mark.parametrize("spoil", ["", "[]", "{}", "cut", "133 for 132"])
def test_what_is_no_table_is_refused(spoil: str) -> None:
    text = table_text(KEY, TABLE)
    spoilt = {"cut": text[:-20], "133 for 132": text.replace("132, 0]", "133, 0]")}.get(spoil, spoil)
    assert spoilt != text
    with pytest.raises(ValueError, match=r"."):
        made_table(spoilt, KEY)


def test_newer_numbers_take_the_place_of_older_ones() -> None:
    newer: Table = {(4096, 4096): ((8, None), (16, STREAM)), (64, 64): ((1, None),)}
    together = merged(TABLE, newer)
    assert together[4096, 4096] == ((1, ROWS), (8, None), (16, STREAM), (40, None), (64, RING))
    assert together[64, 64] == ((1, None),)


def test_tables_are_kept_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.load_made(KEY) == {}
    path = stored.store_made(KEY, TABLE)
    assert path == tmp_path / "tandem" / "products" / KEY.file_name
    stored.store_made(KEY, {(64, 64): ((1, None),)})
    assert stored.load_made(KEY) == {**TABLE, (64, 64): ((1, None),)}
    assert [file.name for file in path.parent.iterdir()] == [KEY.file_name], "nothing half written is left"


def test_one_process_of_a_machine_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with stored.measuring_alone() as first, stored.measuring_alone() as second:
        assert (first, second) == (True, False)
    with stored.measuring_alone() as again:
        assert again
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with stored.measuring_alone() as unwritable:
        assert not unwritable


@pytest.mark.parametrize("spoilt", [b"", b"\xff\xfe", b'{"products": {}}', b"[1, 2]"])
def test_a_spoilt_table_is_passed_over_with_one_warning(
    spoilt: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = stored.store_made(KEY, TABLE)
    assert path is not None
    path.write_bytes(spoilt)
    with caplog.at_level(logging.WARNING):
        assert stored.load_made(KEY) == {}
        assert stored.store_made(KEY, TABLE) == path
    assert len(caplog.records) == 1
    assert "tandem kernels --tune" in caplog.text
    assert stored.load_made(KEY) == TABLE


def test_a_place_that_cant_be_written_costs_the_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tandem").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.store_made(KEY, TABLE) is None
    assert "can't be kept" in caplog.text


def test_a_device_without_a_table_takes_the_plans_of_one_like_it() -> None:
    own, _ = stored.shipped_tables("NVIDIA H200", 132)
    assert own[6144, 4096]
    nobodys, of_others = stored.shipped_tables("a Hopper that nobody has", 132)
    assert nobodys == {}
    assert of_others.keys() >= own.keys()
    assert stored.shipped_tables("NVIDIA H200", 78) == ({}, {}), "as many multiprocessors, or programs wait forever"


def test_shipped_files_say_for_which_device_they_are() -> None:
    for path in stored.SHIPPED.glob("matmul_*.json"):
        assert path.stem == f"matmul_{device_of(path.read_text())[0].replace(' ', '_')}"
        assert json.loads(path.read_text())["products"]
