"""The directory's pure half: a node's own view, its batches, a router's mirror, discovery."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.discovery import Discovery
from tandem.kv_connector.directory.mirror import Mirror, Outcome
from tandem.kv_connector.directory.own_view import BATCH_HASHES, OwnView
from tandem.kv_connector.directory.records import (
    Batch,
    KeySpace,
    NodeRecord,
    TierChange,
    decode_event,
    encode,
    split_hashes,
)

OWNER = NodeKey("decode-1", 7)
OTHER = ("decode-2", 8)


def hash_of(number: int) -> bytes:
    return struct.pack("<QQ", number, number ^ 0xABCDEF)


def hashes(*numbers: int) -> list[bytes]:
    return [hash_of(number) for number in numbers]


def stored(*numbers: int, tier: str = "gpu") -> list[BlockEvent]:
    return [BlockEvent(hash_of(number), True, tier) for number in numbers]


def removed(*numbers: int, tier: str = "gpu") -> list[BlockEvent]:
    return [BlockEvent(hash_of(number), False, tier) for number in numbers]


def take(view: OwnView) -> list[Batch]:
    return view.number(view.take())


def mirror_of(*owners: tuple[str, int], max_entries: int = 1000) -> Mirror:
    mirror = Mirror(max_entries)
    for owner in owners:
        mirror.adopt(owner)
        mirror.await_reset(owner)
    return mirror


def feed(mirror: Mirror, view: OwnView) -> None:
    for batch in take(view):
        assert mirror.apply(decode_event(encode(batch))) is Outcome.APPLIED
        mirror.check_integrity()


# --- the node's view ------------------------------------------------------------------------------------------


def test_first_publication_is_the_whole_view_parents_first() -> None:
    view = OwnView(OWNER)
    view.record(stored(1, 2, 3) + removed(3) + stored(4))
    batches = take(view)
    assert [batch.sequence for batch in batches] == [1, 2]
    assert batches[0].reset
    assert split_hashes(batches[1].changes[0].stored) == hashes(1, 2, 4)
    assert not view.has_pending()


def test_later_publications_carry_the_net_effect_in_order() -> None:
    view = OwnView(OWNER)
    view.record(stored(1, 2, 3))
    take(view)
    view.record(removed(3, 2) + stored(2, 5) + removed(5) + stored(9, tier="cpu"))
    (batch,) = take(view)
    assert batch.changes == (
        TierChange("gpu", stored=hash_of(2), removed=hash_of(3) + hash_of(5)),
        TierChange("cpu", stored=hash_of(9)),
    )


def test_events_that_change_nothing_are_not_published() -> None:
    view = OwnView(OWNER)
    view.record(stored(1))
    take(view)
    view.record(stored(1) + removed(2))
    assert not view.has_pending()


def test_too_much_pending_becomes_a_whole_publication() -> None:
    view = OwnView(OWNER, max_pending=10)
    take(view)
    view.record(stored(*range(11)))
    view.check_integrity()
    assert view.num_overflows == 1
    batches = take(view)
    assert batches[0].reset
    assert batches[0].generation == 2
    assert sum(len(split_hashes(change.stored)) for batch in batches for change in batch.changes) == 11


def test_large_views_are_cut_into_batches() -> None:
    view = OwnView(OWNER)
    view.record(stored(*range(2 * BATCH_HASHES + 1)))
    sizes = [len(split_hashes(batch.changes[0].stored)) for batch in take(view)[1:]]
    assert sizes == [BATCH_HASHES, BATCH_HASHES, 1]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from(["gpu", "cpu"])), max_size=8),
            st.sampled_from(["publish", "lose Redis", "snapshot"]),
        ),
        max_size=30,
    )
)
def test_mirror_follows_the_view_whatever_happens(steps: list) -> None:
    view, mirror, held = OwnView(OWNER, max_pending=10), mirror_of(OWNER), set()
    for step in steps:
        if step == "publish":
            feed(mirror, view) if view.has_pending() else None
        elif step == "lose Redis":
            view.publish_all_again()
        elif step == "snapshot":
            feed(mirror, view) if view.has_pending() else None
            mirror.distrust()
            mirror.load(OWNER, view.sequence, {tier: [h for h, t in held if t == tier] for tier in ("gpu", "cpu")})
        else:
            events = [BlockEvent(hash_of(number), is_stored, tier) for number, is_stored, tier in step]
            view.record(events)
            for event in events:
                (held.add if event.stored else held.discard)((event.block_hash, event.tier))
        view.check_integrity()
        mirror.check_integrity()
    feed(mirror, view) if view.has_pending() else None
    for number in range(13):
        present = any(block_hash == hash_of(number) for block_hash, _ in held)
        assert mirror.longest_prefix(hashes(number)) == ({OWNER: 1} if present else {})


# --- the mirror -----------------------------------------------------------------------------------------------


def test_longest_prefix_per_owner_leaves_out_who_holds_nothing() -> None:
    mirror = mirror_of(OWNER, OTHER, ("idle", 1))
    for owner, numbers in ((OWNER, (1, 2, 3)), (OTHER, (1,))):
        view = OwnView(owner)
        view.record(stored(*numbers))
        feed(mirror, view)
    assert mirror.longest_prefix(hashes(1, 2, 3, 4)) == {OWNER: 3, OTHER: 1}
    assert mirror.longest_prefix(hashes(2, 3)) == {OWNER: 2}
    assert mirror.longest_prefix([]) == {}


class Asked(list[bytes]):
    """Which hashes a lookup wanted."""

    def __init__(self, whole: Iterable[bytes]) -> None:
        super().__init__(whole)
        self.indices: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        self.indices |= set(range(len(self))[index]) if isinstance(index, slice) else {index}
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("num_held", "ends", "group"),
    [(0, (), 0), (1, (7,), 0), (32, (7, 15, 23, 31, 39), 4), (100, range(7, 100, 8), 12)],
)
def test_a_lookup_asks_for_little_more_than_somebody_holds(num_held: int, ends: Iterable[int], group: int) -> None:
    prompt = Asked(hashes(*range(100)))
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    view.record(stored(*range(num_held)))
    feed(mirror, view) if num_held else None
    assert mirror.longest_prefix(prompt) == ({OWNER: num_held} if num_held else {})
    within = set(range(8 * group, min(100, 8 * group + 7))) if num_held else set()
    assert prompt.indices == {0, *ends, *within}


def test_a_block_counts_until_it_left_every_tier() -> None:
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    for events, expected in (
        (stored(1) + stored(1, tier="cpu"), {OWNER: 1}),
        (removed(1), {OWNER: 1}),
        (removed(1, tier="cpu"), {}),
    ):
        view.record(events)
        feed(mirror, view)
        assert mirror.longest_prefix(hashes(1)) == expected


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), asked=st.integers(0, 40))
def test_prefix_lengths_are_exact(lengths: list[int], asked: int) -> None:
    owners = [NodeKey(f"node-{index}", 1) for index in range(len(lengths))]
    mirror = mirror_of(*owners)
    for owner, length in zip(owners, lengths, strict=True):
        view = OwnView(owner)
        view.record(stored(*range(length)))
        feed(mirror, view) if length else None
    expected = {owner: min(length, asked) for owner, length in zip(owners, lengths, strict=True)}
    assert mirror.longest_prefix(hashes(*range(asked))) == {owner: held for owner, held in expected.items() if held}


@given(held=st.sets(st.integers(0, 30)), length=st.integers(0, 30))
def test_a_hole_is_seen_in_the_last_group_only(held: set[int], length: int) -> None:
    """Nodes have none, but what a router knows may be a moment old."""
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    view.record(stored(*held))
    feed(mirror, view)
    found = mirror.longest_prefix(hashes(*range(length))).get(OWNER, 0)
    assert bool(found) == bool(length and 0 in held)
    if found:
        assert found - 1 in held
        assert found == length or found not in held or found % 8 == 0


def test_a_gap_asks_for_a_snapshot_and_old_entries_serve_on() -> None:
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    view.record(stored(1))
    feed(mirror, view)
    view.record(stored(2))
    take(view)  # lost on the way
    view.record(stored(3))
    (late,) = take(view)
    assert mirror.apply(late) is Outcome.GAP
    assert mirror.needs_snapshot() == [OWNER]
    assert mirror.num_gaps == 1
    assert mirror.longest_prefix(hashes(1)) == {OWNER: 1}
    mirror.load(OWNER, late.sequence, {"gpu": hashes(1, 2, 3)})
    assert mirror.needs_snapshot() == []
    assert mirror.apply(late) is Outcome.IGNORED
    assert mirror.longest_prefix(hashes(1, 2, 3)) == {OWNER: 3}


def test_a_reset_heals_a_gap() -> None:
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    view.record(stored(1, 2))
    feed(mirror, view)
    mirror.distrust()
    view.record(removed(2))
    view.publish_all_again()
    feed(mirror, view)
    assert mirror.needs_snapshot() == []
    assert mirror.longest_prefix(hashes(1, 2)) == {OWNER: 1}


def test_a_new_epoch_ends_the_old_one() -> None:
    mirror, view = mirror_of(OWNER), OwnView(OWNER)
    view.record(stored(1))
    feed(mirror, view)
    reborn = NodeKey(OWNER.node_id, 99)
    mirror.adopt(reborn)
    assert mirror.longest_prefix(hashes(1)) == {}
    assert mirror.num_entries == 0
    view.record(stored(2))
    (late,) = take(view)
    assert mirror.apply(late) is Outcome.IGNORED
    assert mirror.owners() == [reborn]


def test_batches_of_an_unknown_node_are_a_gap() -> None:
    view = OwnView(OWNER)
    mirror = Mirror()
    assert mirror.apply(take(view)[0]) is Outcome.GAP
    assert mirror.owners() == []


def test_the_bound_forgets_who_helped_least() -> None:
    mirror = mirror_of(OWNER, OTHER, max_entries=5)
    for owner, numbers in ((OWNER, (1, 2)), (OTHER, (1, 2, 3))):
        view = OwnView(owner)
        view.record(stored(*numbers))
        feed(mirror, view)
    assert mirror.longest_prefix(hashes(3)) == {OTHER: 1}
    mirror.adopt(NodeKey("third", 3))
    mirror.await_reset(NodeKey("third", 3))
    view = OwnView(NodeKey("third", 3))
    view.record(stored(1))
    feed(mirror, view)
    assert mirror.num_forgotten_owners == 1
    assert set(mirror.longest_prefix(hashes(1))) == {OTHER, ("third", 3)}


def test_one_owner_beyond_the_bound_keeps_its_oldest_parents() -> None:
    mirror, view = mirror_of(OWNER, max_entries=3), OwnView(OWNER)
    view.record(stored(1, 2, 3, 4, 5))
    feed(mirror, view)
    assert mirror.longest_prefix(hashes(1, 2, 3, 4, 5)) == {OWNER: 3}


def test_a_long_prompt_is_looked_up_among_many_owners() -> None:
    """8k tokens are 128 hash blocks; 8 owners of 20,000 blocks each."""
    mirror = mirror_of(*[(f"node-{index}", index) for index in range(8)], max_entries=1_000_000)
    prompt = hashes(*range(128))
    for index in range(8):
        mirror.load((f"node-{index}", index), 1, {"gpu": hashes(*range(index * 16), *range(1000, 21_000))})
    found = mirror.longest_prefix(prompt)
    assert found == {(f"node-{index}", index): index * 16 for index in range(1, 8)}


def test_random_batches_leave_an_intact_mirror() -> None:
    rng = random.Random(3)
    owners = [NodeKey(f"node-{index}", index) for index in range(4)]
    mirror = mirror_of(*owners, max_entries=60)
    views = {owner: OwnView(owner) for owner in owners}
    for _ in range(300):
        owner = rng.choice(owners)
        view = views[owner]
        view.record([BlockEvent(hash_of(rng.randrange(50)), rng.random() < 0.6) for _ in range(rng.randrange(6))])
        if view.has_pending():
            feed(mirror, view)
        mirror.longest_prefix(hashes(*range(rng.randrange(5))))
        mirror.check_integrity()


# --- discovery, names, in-process -----------------------------------------------------------------------------


def record(node_id: str, epoch: int = 1, address: str = "tcp://127.0.0.1:1") -> NodeRecord:
    return NodeRecord(node_id=node_id, epoch=epoch, role="decode", control_address=address)


def changes(found: list) -> list[tuple[bool, str, int]]:
    return [(change.present, change.address, change.record.epoch) for change in found]


def test_an_address_outlives_the_node_that_had_it_when_another_is_there() -> None:
    discovery = Discovery(grace_s=10)
    discovery.observe([record("a")], 0)
    assert changes(discovery.observe([record("b")], 5)) == [(True, "tcp://127.0.0.1:1", 1)]
    (gone,) = discovery.observe([record("b")], 10.1)
    assert (gone.present, gone.record.node_id, gone.is_address_taken) == (False, "a", True)
    (gone,) = discovery.observe([], 30)
    assert (gone.present, gone.record.node_id, gone.is_address_taken) == (False, "b", False)
    discovery.observe([record("c"), record("d", 1, "tcp://127.0.0.1:2")], 31)
    moved = discovery.observe([record("c", 2, "tcp://127.0.0.1:2")], 32)
    assert [(change.present, change.is_address_taken) for change in moved] == [(False, False), (True, False)]


def test_discovery_tells_new_changed_and_long_missing_nodes() -> None:
    discovery, here, there = Discovery(grace_s=10), "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
    assert changes(discovery.observe([record("a")], 0)) == [(True, here, 1)]
    assert discovery.observe([record("a")], 1) == []
    assert changes(discovery.observe([record("a", 2)], 2)) == [(True, here, 2)]
    assert changes(discovery.observe([record("a", 3, there)], 3)) == [(False, here, 2), (True, there, 3)]
    assert discovery.observe([], 12.9) == []
    assert changes(discovery.observe([], 13.1)) == [(False, there, 3)]
    assert discovery.records == {}


def test_absence_does_not_count_while_redis_is_away() -> None:
    discovery = Discovery(grace_s=10)
    discovery.observe([record("a")], 0)
    discovery.unreachable(100)
    assert discovery.observe([], 105) == []


def test_a_goodbye_of_an_older_epoch_is_ignored() -> None:
    discovery = Discovery(grace_s=10)
    discovery.observe([record("a", 2)], 0)
    assert discovery.left(NodeKey("a", 1)) == []
    assert changes(discovery.left(NodeKey("a", 2))) == [(False, "tcp://127.0.0.1:1", 2)]
    assert discovery.left(NodeKey("a", 2)) == []


def test_namespaces_share_no_key() -> None:
    ours, theirs = KeySpace("one"), KeySpace("two")
    for space in (ours, theirs):
        assert space.blocks(NodeKey("n", 0xAB), "gpu") == f"{space.namespace}:{{n}}:kv:00000000000000ab:gpu"
    names = [{s.nodes, s.events, s.node("n"), s.sequence(OWNER), *s.all_blocks(OWNER)} for s in (ours, theirs)]
    assert not names[0] & names[1]


def test_split_hashes_refuses_half_a_hash() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        split_hashes(b"x" * 17)
