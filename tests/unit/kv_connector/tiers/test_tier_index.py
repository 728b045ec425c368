"""One tier's table against a plain model of it, and what is worth loading."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.rate import Rate
from tandem.kv_connector.tiers.index import StoredBlock, TierIndex
from tandem.kv_connector.tiers.worth_loading import num_worth_loading


def name(number: int) -> bytes:
    return bytes([number])


def chain(tier: TierIndex, *numbers: int, tenant: bytes = b"") -> list[bytes | None]:
    """Stores each as the child of the one before; what was evicted."""
    evicted = []
    for before, number in zip((None, *numbers), numbers, strict=False):
        found = tier.reserve(name(number), None if before is None else name(before), tenant)
        assert found is not None
        evicted.append(found[1])
        tier.commit(name(number))
        tier.check_integrity()
    return evicted


def test_children_go_first_and_parents_become_leaves() -> None:
    tier = TierIndex(4)
    chain(tier, 1, 2, 3, 4)
    assert tier.next_to_go(9) == [name(n) for n in (4, 3, 2, 1)]
    assert chain(tier, 5, 6, 7) == [name(4), name(3), name(2)]


def test_what_is_used_again_outlives_what_came_later() -> None:
    tier = TierIndex(3)
    for number in (1, 2, 3):
        chain(tier, number)
    tier.use([name(1)])
    assert [chain(tier, number) for number in (4, 5)] == [[name(2)], [name(3)]]


def test_what_was_used_often_goes_at_last() -> None:
    tier = TierIndex(2)
    chain(tier, 1)
    for _ in range(20):
        tier.use([name(1)])
    evicted = [chain(tier, number)[0] for number in range(2, 60)]
    assert 5 < evicted.index(name(1)) < 40


def test_what_is_written_is_not_found_and_what_is_read_stays() -> None:
    tier = TierIndex(2)
    assert tier.reserve(b"a", None) is not None
    assert not tier.is_ready(b"a")
    chain(tier, 1)
    tier.pin([name(1)])
    assert tier.reserve(b"b", None) is None, "nothing could be evicted"
    tier.unpin([name(1)])
    assert tier.reserve(b"b", None) == (tier.slot(b"b"), name(1))
    tier.check_integrity()


def test_neither_the_parent_nor_what_is_kept_makes_room() -> None:
    tier = TierIndex(2)
    chain(tier, 1)
    chain(tier, 2)
    assert tier.reserve(b"child", name(1), kept={name(2)}) is None
    assert tier.reserve(b"child", name(1)) == (tier.slot(b"child"), name(2))


def test_copies_of_the_tier_above_go_first_those_used_last_before_others() -> None:
    tier = TierIndex(4)
    for number in (1, 2, 3, 4):
        chain(tier, number)
    for number in (1, 2, 3):
        tier.note_copy(name(number), True)
    tier.use([name(1)])
    assert tier.next_to_go(4) == [name(4)], "copies are not lost"
    assert tier.next_to_go(3) == []
    tier.note_copy(name(2), False)
    assert [chain(tier, number) for number in (5, 6)] == [[name(1)], [name(3)]]
    assert tier.next_to_go(4) == [name(2), name(4), name(5), name(6)], "no copy any more, it is worth its uses"


def test_a_tenant_beyond_its_quota_evicts_its_own() -> None:
    tier = TierIndex(8, {b"t": 2, b"none": 0}.get)
    chain(tier, 1)
    assert [chain(tier, number, tenant=b"t") for number in (2, 3, 4)] == [[None], [None], [name(2)]]
    assert tier.reserve(b"x", None, b"none") is None
    assert tier.is_ready(name(1))


def test_restored_blocks_are_where_they_were() -> None:
    tier = TierIndex(4)
    tier.restore([StoredBlock(2, b"p", None, b""), StoredBlock(0, b"c", b"p", b"t")])
    tier.check_integrity()
    assert (tier.slot(b"p"), tier.slot(b"c"), tier.num_free) == (2, 0, 2)
    assert tier.next_to_go(2) == [b"c", b"p"]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("srrupxd"), st.integers(0, 12), st.integers(0, 12)), max_size=60),
)
def test_whatever_happens_it_is_whole(capacity: int, actions: list[tuple[str, int, int]]) -> None:
    """`next_to_go` also tells what evictions will take, whoever asks for them."""
    tier, pinned = TierIndex(capacity), []
    for action, number, other in actions:
        block_hash = name(number)
        if action in "sr" and block_hash not in tier:
            foreseen = tier.next_to_go(capacity)
            parent = name(other) if other < number else None
            found = tier.reserve(block_hash, parent)
            if found is not None and found[1] is not None:
                assert found[1] == next(each for each in foreseen if each != parent)
            if found is not None and action == "r":
                tier.commit(block_hash)
        elif action == "u":
            tier.use([name(other), block_hash])
        elif action == "p" and tier.is_ready(block_hash):
            tier.pin([block_hash])
            pinned.append(block_hash)
        elif action == "x" and pinned:
            tier.unpin([pinned.pop()])
        elif action == "d" and block_hash in tier and block_hash not in pinned:
            tier.remove(block_hash)
        tier.check_integrity()
    assert len(tier) + tier.num_free == capacity


@pytest.mark.parametrize(
    ("load_seconds", "compute_seconds", "expected"),
    [
        ([1, 1, 1], 0, 3),  # unknown
        ([1, 1, 1], 2, 3),
        ([1, 1, 5], 2, 2),
        ([3, 3, 3], 2, 0),
        ([3, 1, 1], 2, 3),  # the first does not pay, the others do
        ([2, 2], 2, 2),
        ([], 2, 0),
    ],
)
def test_as_many_are_loaded_as_takes_the_least_time(
    load_seconds: list[float], compute_seconds: float, expected: int
) -> None:
    assert num_worth_loading(load_seconds, compute_seconds) == expected


def test_a_rate_is_smoothed_and_doubted() -> None:
    rate = Rate()
    rate.measured(4, 2.0)
    assert rate.seconds == 0.5
    rate.measured(1, 1.0)
    assert rate.seconds == pytest.approx(0.6)
    rate.doubt()
    assert rate.seconds < 0.6
