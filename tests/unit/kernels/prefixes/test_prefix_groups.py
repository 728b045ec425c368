"""Grouping by leading blocks against a search over every choice, and the layout that kernels read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels.prefixes import prefix_groups
from tandem.kernels.prefixes.prefix_groups import PrefixGroup, PrefixLayout, SharingCosts, choose_groups, max_chunks

BLOCK = 64


@pytest.fixture(autouse=True)
def _small_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 0)
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 0)


def found(tables: np.ndarray, whole: np.ndarray, members: int = 16, block_size: int = BLOCK) -> list[PrefixGroup]:
    return choose_groups(tables, np.arange(len(tables)), whole, block_size, SharingCosts(members, 1))


def agreed(tables: np.ndarray, whole: np.ndarray, rows: tuple[int, ...]) -> int:
    width = int(min(whole[row] for row in rows))
    same = (tables[list(rows), :width] == tables[rows[0], :width]).all(0)
    return width if same.all() else int(same.argmin())


def best_saving(tables: np.ndarray, whole: np.ndarray, rows: tuple[int, ...], members: int) -> int:
    """The most that any partition of `rows` into groups saves."""
    if len(rows) < 2:
        return 0
    best = 0
    for size in range(len(rows)):
        for others in itertools.combinations(rows[1:], size):
            group = (rows[0], *others)
            own = (
                SharingCosts(members, 1).saved_bytes(len(group), agreed(tables, whole, group) * BLOCK) if others else 0
            )
            rest = tuple(row for row in rows if row not in group)
            best = max(best, own + best_saving(tables, whole, rest, members))
    return best


def saving(groups: list[PrefixGroup], members: int) -> int:
    return sum(SharingCosts(members, 1).saved_bytes(len(group.rows), group.num_blocks * BLOCK) for group in groups)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tables as a prefix cache makes them: an id at index i is used only after the same ids before it."""
    num_rows = draw(st.integers(1, 6))
    choices = draw(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=num_rows, max_size=num_rows))
    ids: dict[tuple[int, ...], int] = {}
    tables = [[ids.setdefault(tuple(row[: i + 1]), len(ids)) for i in range(5)] for row in choices]
    whole = draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    return np.array(tables, np.int32), np.array(whole)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([2, 3, 16]))
def test_groups_are_true_apart_and_near_the_best(batch: tuple[np.ndarray, np.ndarray], members: int) -> None:
    tables, whole = batch
    groups = found(tables, whole, members)
    rows = [int(row) for group in groups for row in group.rows]
    assert len(rows) == len(set(rows))
    for group in groups:
        assert 1 <= group.num_blocks <= agreed(tables, whole, tuple(group.rows))
    best = best_saving(tables, whole, tuple(range(len(tables))), members)
    assert best / 2 <= saving(groups, members) <= best  # rows that a subtree's group leaves over stay alone


def test_a_common_system_prompt_does_not_hide_longer_prefixes() -> None:
    tables = np.array([[1, *range(10 * g, 10 * g + 9), 900 + r] for g in (1, 2) for r in range(3)], np.int32)
    groups = found(tables, np.full(6, 11))
    assert sorted((group.rows.tolist(), group.num_blocks) for group in groups) == [([0, 1, 2], 10), ([3, 4, 5], 10)]


def test_prefixes_end_where_tiles_do() -> None:
    tables = np.array([[1, 2, 3, 4, 5, 6, 7, 8, row] for row in (20, 21)], np.int32)
    assert [g.num_blocks for g in found(tables, np.full(2, 9), block_size=16)] == [8]
    assert [g.num_blocks for g in found(tables, np.full(2, 7), block_size=16)] == [4]
    assert found(tables, np.full(2, 3), block_size=16) == []


def test_slots_choose_the_tables() -> None:
    tables = np.array([[5, 6], [7, 8], [5, 9]], np.int32)
    (group,) = choose_groups(tables, np.array([2, 1, 0]), np.array([1, 1, 1]), BLOCK, SharingCosts(4, 1))
    assert (group.rows.tolist(), group.num_blocks) == ([0, 2], 1)


def test_what_does_not_pay_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [8, 9, 10, 11]], np.int32)
    whole = np.full(3, 4)
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 3 * BLOCK)
    assert found(tables, whole) == []
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 3 * BLOCK - 1)
    assert len(found(tables, whole)) == 1
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 1)
    assert found(tables, whole) == []
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 0)
    assert len(found(tables, whole)) == 1
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 2 * BLOCK)
    assert found(tables, whole) == []
    assert found(tables, whole, members=1) == []


def test_packing_cuts_groups_evenly_and_places_every_row() -> None:
    layout = PrefixLayout.for_rows(20, 4)
    groups = [PrefixGroup(np.arange(3, 13), 2), PrefixGroup(np.array([0, 19]), 5)]
    lengths, chunk_rows, row_lens, places = layout.split(layout.pack(groups, BLOCK))
    assert lengths.tolist() == [128] * 3 + [320] + [0] * (layout.chunks - 4)
    assert [(row >= 0).sum() for row in chunk_rows[:4]] == [4, 4, 2, 2]
    for row, length in enumerate(row_lens):
        if length:
            assert chunk_rows[places[row] // 4, places[row] % 4] == row
            assert lengths[places[row] // 4] == length
    assert np.flatnonzero(row_lens).tolist() == [0, *range(3, 13), 19]
    assert (chunk_rows[4:] == -1).all()


def test_groups_beyond_the_last_chunk_are_left_out_whole() -> None:
    layout = PrefixLayout(2, 2, 8)
    groups = [PrefixGroup(np.array([0, 1]), 1), PrefixGroup(np.array([2, 3, 4, 5]), 1)]
    lengths, chunk_rows, row_lens, _ = layout.split(layout.pack(groups, BLOCK))
    assert lengths.tolist() == [64, 0]
    assert row_lens.tolist() == [64, 64, 0, 0, 0, 0, 0, 0]
    assert chunk_rows.tolist() == [[0, 1], [-1, -1]]


@pytest.mark.parametrize("members", [2, 3, 16])
@pytest.mark.parametrize("sizes", [(2,), (3,), (3, 2), (3, 3), (5, 4), (17, 3), (33, 2, 2)])
def test_a_view_of_the_batchs_rows_holds_all_chunks(sizes: tuple[int, ...], members: int) -> None:
    """Kernels see max_chunks(rows of the batch) chunks of a layout for many more rows."""
    ends = np.cumsum(sizes)
    groups = [PrefixGroup(np.arange(end - size, end), 1) for end, size in zip(ends, sizes, strict=True)]
    layout = PrefixLayout.for_rows(96, members)
    lengths, _, row_lens, _ = layout.split(layout.pack(groups, BLOCK))
    assert (row_lens > 0).sum() == ends[-1]
    assert (lengths > 0).sum() <= max_chunks(int(ends[-1]))
