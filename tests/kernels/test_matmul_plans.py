"""The tuned tables of matrix products: parsing, choice and validity of plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.kernels.products import matmul
from tandem.kernels.products.matmul_plans import (
    MAX_PROGRAMS,
    WORKSPACE_WORDS,
    RingPlan,
    RowsPlan,
    StreamPlan,
    choose_plan,
    is_measured,
    parse_table,
    prompt_slices,
    without_whole_tiles,
)

TUNED = sorted((Path(matmul.__file__).parent / "tuned").glob("matmul_*.json"))
STREAM, ROWS = StreamPlan(64, 64, 128, 6, 4, 128, 2), RowsPlan(2, 2048, 4)
RING = RingPlan(128, 128, 64, 6, 2)


def table_text(steps: list[list[object]], sizes: str = "4096,4096") -> str:
    return json.dumps({"device": "some GPU", "products": {sizes: steps}})


def test_parses_every_kind_of_plan() -> None:
    table = parse_table(table_text([[1, list(ROWS)], [40, None], [64, list(STREAM)], [128, list(RING)]]))
    assert table == {(4096, 4096): ((1, ROWS), (40, None), (64, STREAM), (128, RING))}


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([[8, None], [8, None]], "do not rise"),
        ([[8, None], [4, None]], "do not rise"),
        ([[8, [64, 8]]], "plan of 2 fields"),
        ([[8, [64, 8, 256, 6]]], "plan of 4 fields"),
    ],
)
def test_refuses_tables_it_would_misread(steps: list[list[object]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_table(table_text(steps))


@pytest.mark.parametrize(
    ("num_rows", "plan"), [(0, None), (1, ROWS), (2, None), (40, None), (41, STREAM), (64, STREAM), (65, None)]
)
def test_takes_the_next_larger_number_of_rows(num_rows: int, plan: object) -> None:
    table = parse_table(table_text([[1, list(ROWS)], [40, None], [64, list(STREAM)]]))
    assert choose_plan(table, num_rows, 4096, 4096) == plan
    assert choose_plan(table, num_rows, 4096, 14336) is None


def test_torch_counts_as_measured_and_more_rows_do_not() -> None:
    table = parse_table(table_text([[1, list(ROWS)], [40, None]]))
    assert [is_measured(table, rows, 4096, 4096) for rows in (1, 2, 40, 41)] == [True, True, True, False]
    assert not is_measured(table, 1, 4096, 14336)


def test_takes_no_plan_that_does_not_fit_the_sizes() -> None:
    table = parse_table(table_text([[1, list(ROWS)], [64, list(STREAM)]], sizes="4096,512"))
    assert choose_plan(table, 1, 4096, 512) is None
    assert choose_plan(table, 64, 4096, 512) is None


@pytest.mark.parametrize(
    ("plan", "num_rows", "sizes", "valid"),
    [
        (ROWS, 4, (4096, 4096), True),
        (ROWS, 5, (4096, 4096), False),
        (ROWS, 1, (4097, 4096), False),
        (ROWS, 1, (4096, 4032), False),
        (STREAM, 64, (4096, 4096), True),
        (STREAM._replace(lead=16), 64, (4096, 4096), False),  # nothing left for the second program of a tile
        (STREAM._replace(programs=64), 64, (4096, 4096), False),  # one program a tile: nobody to lead
        (STREAM._replace(programs=64, lead=0), 64, (4096, 4096), True),
        (STREAM._replace(programs=MAX_PROGRAMS + 1, lead=0), 64, (4096, 14336), False),
        (StreamPlan(128, 256, 64, 4, 8, WORKSPACE_WORDS // (128 * 256)), 256, (28672, 4096), True),
        (StreamPlan(128, 256, 64, 4, 8, WORKSPACE_WORDS // (128 * 256) + 1), 256, (28672, 4096), False),
        (RING, 128, (4096, 4096), True),
        (RING, 320, (128256, 1000), True),
        (RING._replace(stages=7), 128, (4096, 4096), False),  # more shared memory than there is
        (RING._replace(tile_m=256, stages=4), 256, (4096, 4096), True),
        (RING._replace(tile_m=256, stages=3, groups=1), 256, (4096, 4096), False),  # more sums than registers
        (RING._replace(groups=4), 128, (4096, 4096), False),
    ],
)
def test_validity(plan: StreamPlan | RingPlan | RowsPlan, num_rows: int, sizes: tuple[int, int], valid: bool) -> None:
    assert plan.is_valid(num_rows, *sizes) is valid


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "lengths"),
    [
        (512, 28672, []),  # five of six multiprocessors would work
        (1023, 28672, []),
        (1024, 28672, [1024]),
        (1088, 28672, []),
        (2048, 28672, [2048]),
        (2112, 28672, []),
        (3072, 28672, [2048, 1024]),
        (8192, 28672, [2048] * 4),
        (8200, 28672, []),
        (1024, 6144, []),
        (2048, 6144, [2048]),
        (2048, 34816, [2048]),
        (2048, 256, []),
        (0, 28672, []),
    ],
)
def test_gate_and_up_of_prompts_where_all_multiprocessors_work(
    num_rows: int, num_outputs: int, lengths: list[int]
) -> None:
    slices = prompt_slices(num_rows, num_outputs)
    assert [each.stop - each.start for each in slices] == lengths
    assert [each.start for each in slices] == [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize("num_rows", [1, 1023, 1024, 1151, 1152, 2048, 8000, 16384])
def test_as_many_rows_as_no_slices_serve(num_rows: int) -> None:
    most = without_whole_tiles(num_rows)
    assert num_rows - 256 < most <= num_rows
    assert not any(prompt_slices(most, num_outputs) for num_outputs in (2048, 16896, 28672))


@pytest.mark.parametrize("file", TUNED, ids=lambda file: file.stem)
def test_shipped_tables_hold_valid_plans_only(file: Path) -> None:
    text = file.read_text()
    assert file.stem == f"matmul_{json.loads(text)['device'].replace(' ', '_')}"
    for sizes, steps in parse_table(text).items():
        assert steps[-1][0] <= matmul.LONGEST_TUNED
        for rows, plan in steps:
            assert plan is None or plan.is_valid(rows, *sizes), f"{rows} rows of {sizes}"


def test_a_table_is_shipped() -> None:
    assert "matmul_NVIDIA_H200" in {file.stem for file in TUNED}
