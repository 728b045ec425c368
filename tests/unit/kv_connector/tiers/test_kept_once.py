"""What is left to peers: never by all who hold it, never what is reached through nothing else, never for long."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from waiting import wait_until

from redis_process import running_redis
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.kept import LEASE_S, KeptElsewhere, gives_way
from tandem.kv_connector.directory.publisher import PublisherTimes, RedisPublisher
from tandem.kv_connector.directory.question import Question
from tandem.kv_connector.directory.records import NodeRecord
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.write_back import WriteBack

A, B, C = (bytes([letter]) * 16 for letter in b"abc")
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def lost_copies(gives_way: Callable[[str, str], bool], names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Explores all orders of: a node computes the block, hears who has it, leaves it to whom it heard of, however long
    ago that was. Returns the nodes that left it, where none had it in the end."""
    nodes = range(len(names))
    nobody = (False,) * len(names)
    first = [(tuple(node == holder for node in nodes), nobody) for holder in nodes]
    seen, open_states, lost = set(first), list(first), []
    while open_states:
        holds, knows = open_states.pop()
        for node in nodes:
            computed = tuple(held or other == node for other, held in enumerate(holds))
            heard = any(holds[other] and gives_way(names[node], names[other]) for other in nodes if other != node)
            following = [
                (computed, knows),
                (holds, tuple(heard if other == node else known for other, known in enumerate(knows))),
            ]
            if holds[node] and knows[node]:
                left = tuple(held and other != node for other, held in enumerate(holds))
                if not any(left):
                    lost.append((names[node],))
                following.append((left, knows))
            for state in following:
                if state not in seen:
                    seen.add(state)
                    open_states.append(state)
    return lost


def test_the_last_copy_is_left_to_nobody_however_late_nodes_hear_of_each_other() -> None:
    assert not lost_copies(gives_way, NAMES[:3])
    assert not lost_copies(gives_way, NAMES)
    assert lost_copies(lambda own, other: True, NAMES[:2]), "without an order two leave it to each other"


def test_the_order_is_total_and_mixes_roles() -> None:
    for own, other in itertools.permutations(NAMES, 2):
        assert gives_way(own, other) != gives_way(other, own)
    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(8)]
    ways = {gives_way(own, other) for own in names[:8] for other in names[8:]}
    assert ways == {True, False}


class Node:
    """A pool of which a chain of three blocks is cached, and a host tier below it."""

    def __init__(self, num_blocks: int = 3) -> None:
        self.now = 0.0
        self.kept = KeptElsewhere(lambda: self.now)
        self.pool, self.host = BlockPool(num_blocks, enable_caching=True), TierIndex(8)
        self.back = WriteBack(self.pool, self.host, None, lambda event: None, 8, self.kept)
        blocks = self.pool.allocate(3)
        assert blocks is not None
        for block_id, block_hash, parent in zip(blocks, (A, B, C), (None, A, B), strict=True):
            self.pool.register(block_id, block_hash, parent)
        self.pool.free(blocks, None)

    def saved(self, is_idle: bool = False) -> list[bytes]:
        """What it begins to save in its next turn."""
        self.back.on_turn(self.pool.drain_events(), is_idle)
        return [each for job in self.back.drain_jobs() for each in job.hashes]


def test_an_idle_node_saves_nothing_that_it_has_not_asked_about() -> None:
    assert Node().saved(is_idle=True) == [C, B, A], "the pool would reuse them next"
    large = Node(num_blocks=40)
    assert large.saved(is_idle=True) == []
    assert set(large.kept.asked) == {A, B, C}


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_a_peer_keeps_is_not_saved_and_not_counted_as_lost(is_idle: bool) -> None:
    node = Node()
    node.kept.answer((A, B, C), 0.0)
    assert node.saved(is_idle) == []
    assert set(node.kept.asked) == {A, B, C}, "what goes next is asked for again"
    node.pool.allocate(3)
    assert node.saved() == []
    assert (node.back.counters.blocks_left, node.back.counters.blocks_lost) == (3, 0)


def test_what_was_heard_long_ago_counts_no_more() -> None:
    node = Node()
    node.kept.answer((A, B, C), 0.0)
    node.now = LEASE_S
    assert node.saved() == []
    node.now = LEASE_S + 0.1
    assert node.saved() == [C, B, A]


def test_a_block_is_kept_that_another_one_here_is_reached_through() -> None:
    node = Node()
    node.host.reserve(C, B, b"")
    node.kept.answer((A, B), 0.0)
    assert node.saved() == [B]
    assert node.saved() == [], "A is B's parent, but one save is under way"
    assert node.host.has_children(A)


def test_window_blocks_that_host_memory_lacks_are_kept_for_what_it_has_behind_them() -> None:
    """Of the first block host memory has no window blocks, and the second was found by them."""
    host, pool = TierIndex(4), BlockPool(6, enable_caching=True, window=BlockWindow(3, 1, 1))
    back = WriteBack(pool, host, None, lambda event: None, 8, KeptElsewhere())
    for block_hash, parent in ((A, None), (B, A)):
        host.reserve(block_hash, parent)
        host.commit(block_hash, block_hash == B)
    [block_id] = pool.allocate(1) or []
    pool.register(block_id, A)
    pool.free([block_id], None)
    assert back.is_only_way(A)
    pool.windows.reuse(pool.windows.of(block_id)[0])
    assert not back.is_only_way(A), "it is as bare there"


@pytest.mark.parametrize(("is_whole", "is_end", "is_lost"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_whole_block_that_ages_is_lost_if_its_keeper_has_no_window_blocks(
    is_whole: bool, is_end: bool, is_lost: int
) -> None:
    kept, pool = KeptElsewhere(lambda: 0.0), BlockPool(4, enable_caching=True, window=BlockWindow(3, 1, 1))
    back = WriteBack(pool, TierIndex(4), None, lambda event: None, 8, kept)
    [block_id] = pool.allocate(1, 0 if is_whole else 1) or []
    pool.register(block_id, A)
    pool.free([block_id], None, 0 if is_whole else 1)
    back.on_turn(pool.drain_events(), is_idle=False)
    kept.answer((A,), 0.0, (A,) if is_end else ())
    pool.allocate(2)
    back.on_turn(pool.drain_events(), is_idle=False)
    assert (back.counters.blocks_left, back.counters.blocks_lost) == (1 - is_lost, is_lost)


def record(node_id: str, host: str = "127.0.0.1") -> NodeRecord:
    return NodeRecord(node_id=node_id, epoch=1, role="unified", control_address=f"tcp://{host}:1", identity_key=b"m")


def test_a_node_hears_from_redis_what_those_behind_it_hold() -> None:
    """Of two that hold a block, one gives way; a node of another host keeps nothing for anybody."""
    first, last = ("a", "b") if gives_way("a", "b") else ("b", "a")
    times = PublisherTimes(heartbeat_s=0.05)
    with running_redis() as server:
        kept = {name: KeptElsewhere() for name in (first, last, "far")}
        hosts = {first: "127.0.0.1", last: "127.0.0.1", "far": "10.0.0.1"}
        nodes = [RedisPublisher(server.url, "t", record(name, hosts[name]), times, kept[name]) for name in kept]
        try:
            for node in nodes:
                node.publish([BlockEvent(A, True, "cpu"), BlockEvent(B, True)])
            nodes[1].publish([BlockEvent(C, True)])
            for each in kept.values():
                each.ask(Question((A, B, C, bytes(16))))
            wait_until(lambda: all(each in kept[first] for each in (A, B, C)), "an answer")
            assert bytes(16) not in kept[first]
            nodes[1].publish([BlockEvent(A, False, "cpu")])
            wait_until(lambda: A not in kept[first], "news")
            assert B in kept[first]
            assert not any(each in kept[name] for each in (A, B, C) for name in (last, "far"))
        finally:
            for node in nodes:
                node.close()
