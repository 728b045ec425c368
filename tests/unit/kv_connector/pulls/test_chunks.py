"""How a prompt is divided among nodes, and who computes and needs what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.contracts.keys import AttemptKey
from tandem.kv_connector.pulls.chunks import ENOUGH_ROUNDS, WORTHWHILE_TOKENS, ChunkTable, divide
from tandem.kv_connector.pulls.share import Coming, Share
from tests.fakes.made_requests import made_request


def spans(table: ChunkTable, first: int = 0) -> list[tuple[int, int]]:
    return list(itertools.pairwise((first, *table.ends)))


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [4_096, 15_000, 120_000])
def test_chunks_are_equally_long_and_worth_it(num_tokens: int, num_nodes: int) -> None:
    """Of a long prompt as few as can be, of a shorter one rounds enough if chunks aren't too short for that."""
    table = divide(0, num_tokens, num_nodes, 4096, 16)
    assert table is not None
    lengths = [end - begin for begin, end in spans(table)]
    assert max(lengths) - min(lengths) <= 32
    num_rounds = (len(lengths) - 1) // num_nodes
    assert num_rounds == 1 or min(lengths) >= WORTHWHILE_TOKENS - 16
    assert num_rounds <= ENOUGH_ROUNDS or num_tokens > 4096 * (len(lengths) - num_nodes), "a round less would do"


@pytest.mark.parametrize(("first", "end", "most", "size"), [(0, 17, 8192, 16), (0, 1000, 8, 16), (32, 33, 64, 16)])
def test_what_can_not_be_divided_is_one_nodes(first: int, end: int, most: int, size: int) -> None:
    assert divide(first, end, 2, most, size) is None


@given(
    first=st.integers(0, 400), length=st.integers(1, 3000), nodes=st.integers(2, 6), most=st.integers(8, 3000),
    size=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_every_token_is_computed_once_and_whoever_is_behind_it_gets_it(
    first: int, length: int, nodes: int, most: int, size: int
) -> None:
    begin, end = first * size, first * size + length
    table = divide(begin, end, nodes, most, size)
    if table is None:
        return
    assert table.makes_sense(size)
    assert table.ends[-1] == end
    assert all(0 < after - before <= most for before, after in spans(table, begin))
    assert sorted(index for place in range(nodes) for index in table.of(place)) == list(range(len(table.ends)))
    for place in range(nodes):
        before_last = range(table.of(place)[-1])
        assert sorted([*table.needed_at(place), *table.of(place)[:-1]]) == list(before_last)
        for index in range(len(table.ends)):
            assert (place in table.needed_by(index)) == (index in table.needed_at(place))
        position, order = begin, []
        while position < table.ends[table.of(place)[-1]]:
            order.append(table.next_of(place, position))
            position = table.ends[order[-1]]
        assert order == list(table.of(place)), "each computes its chunks in order"


def test_a_part_waits_for_all_that_comes_before_it() -> None:
    ends = tuple(8 * (index + 1) for index in range(7))
    request = made_request("r", range(56))
    share = Share("n", 0, 0, ChunkTable(ends, 3), (), request, tuple(range(14)), 4, 9.0, 0)
    share.coming = {index: Coming(AttemptKey(str(index), 0)) for index in share.table.needed_at(0)}
    assert share.next_part() == (0, 8)
    share.position = 4
    assert share.next_part() == (4, 8), "the rest of a chunk that took two steps"
    share.position = 8
    for index in (1, 2):
        assert share.next_part() is None
        share.coming[index].has_begun = True
    assert share.next_part() == (24, 32)
    assert [share.coming[index] for index in (1, 2)] == share.needs(3)
    assert (share.blocks_of(3), share.end) == ([6, 7], 56)
    share.coming[1].is_read = share.coming[1].is_verified = share.coming[2].is_read = True
    assert not share.is_sound
    share.coming[2].is_verified = True
    assert share.is_sound
    assert not share.has_come
