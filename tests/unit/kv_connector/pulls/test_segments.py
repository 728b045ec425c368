"""How a prompt is divided among nodes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_connector.pulls.segments import DOUBLE_AT, divide

MOST = 1 << 20


def seconds(begin: int, end: int) -> float:
    """What a part takes, where a token without context takes one."""
    return (end - begin) * (1 + (begin + end) / 2 / DOUBLE_AT)


def test_all_parts_take_equally_long() -> None:
    for num_nodes in (2, 3, 4):
        places = [0, *divide(0, 120_000, num_nodes, MOST, 16), 120_000]
        taken = [seconds(*part) for part in itertools.pairwise(places)]
        assert max(taken) < 1.01 * min(taken)
        assert len(taken) == num_nodes
    assert divide(0, 120_000, 2, MOST, 16) == [77_680]
    assert divide(0, 120_000, 2, 65_536, 16) == [65_536], "no part is longer than a step"


def test_what_can_not_be_divided_is_one_nodes() -> None:
    assert divide(0, 120_000, 2, 8192, 16) == []
    assert divide(0, 17, 4, 8192, 16) == []
    assert divide(0, 1000, 1, 8192, 16) == []


@given(
    first=st.integers(0, 400), length=st.integers(1, 5000), nodes=st.integers(1, 6), most=st.integers(8, 3000),
    size=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_parts_are_whole_blocks_that_fit_into_a_step(first: int, length: int, nodes: int, most: int, size: int) -> None:
    begin, end = first * size, first * size + length
    ends = divide(begin, end, nodes, most, size)
    assert len(ends) in (0, nodes - 1)
    if ends:
        assert all(each % size == 0 for each in ends)
        assert all(0 < after - before <= most for before, after in itertools.pairwise([begin, *ends, end]))
