"""What a pool reuses first since peers keep it: nothing that is in use, nothing that others are reached through, and
never the last copy."""

from __future__ import annotations

import random

from tandem.engine.blocks.pool import BlockPool
from tandem.kv_connector.directory.kept import KeptElsewhere, gives_way
from tandem.kv_connector.directory.spare_blocks import SpareBlocks

A, B, C, X, Y = (bytes([letter]) * 16 for letter in b"abcxy")


class Node:
    """A pool, whose blocks it gives up when it hears what peers keep."""

    def __init__(self, name: str = "node", num_blocks: int = 12) -> None:
        self.name = name
        self.pool, self.kept = BlockPool(num_blocks, enable_caching=True), KeptElsewhere(lambda: 0.0)
        self.spare = SpareBlocks(self.pool, self.kept)
        self.given_up: list[bytes] = []
        reuse_first = self.pool.reuse_first
        self.pool.reuse_first = lambda hashes: (self.given_up.extend(hashes), reuse_first(hashes))[1]  # type: ignore[method-assign]

    def cache(self, *chain: bytes) -> None:
        """Has these cached, whatever has to go for it; used last now."""
        hits = self.pool.match_prefix(chain)
        self.pool.touch(hits)
        blocks = self.pool.allocate(len(chain) - len(hits))
        assert blocks is not None
        for index, block_id in enumerate(blocks, len(hits)):
            self.pool.register(block_id, chain[index], chain[index - 1] if index else None)
        self.pool.free([*hits, *blocks], None)

    def hears(self, *kept: bytes) -> None:
        """The directory's answers to a whole round."""
        for _ in range(2):
            self.kept.answer(kept, 0.0)
            self.spare.on_turn()
        self.pool.check_integrity()


def test_what_a_peer_keeps_goes_before_what_nobody_has() -> None:
    node = Node(num_blocks=5)
    node.cache(X, Y)
    node.cache(A, B, C)
    assert node.pool.cold_end(5) == [Y, X, C, B, A]
    node.hears(A, B, C)
    assert node.pool.cold_end(5) == [C, B, A, Y, X]
    assert node.spare.num_given_up == 3
    node.pool.allocate(3)
    assert node.pool.cached_hashes() == [X, Y]


def test_what_is_in_use_or_on_the_way_to_what_stays_is_not_given_up() -> None:
    node = Node(num_blocks=5)
    node.cache(X, Y)
    node.cache(A, B, C)
    node.hears(A, B)
    assert node.pool.cold_end(5) == [Y, X, C, B, A], "C is reached through them"
    node.pool.touch(node.pool.match_prefix([A, B, C]))
    node.hears(A, B, C)
    assert node.spare.num_given_up == 0


def test_what_was_used_since_it_was_given_up_does_not_go_with_its_parent() -> None:
    """The peer kept it then, and has forgotten it since."""
    node = Node(num_blocks=4)
    node.cache(X)
    node.cache(A, B)
    beginning = node.pool.match_prefix([A])
    node.pool.touch(beginning)
    node.hears(A, B)
    assert node.given_up == [B], "A is in use"
    node.pool.free(beginning, None)
    node.cache(A, B)
    node.hears(A)
    assert node.given_up == [B]
    node.pool.allocate(2)
    assert set(node.pool.cached_hashes()) == {A, B}, "X is older"


def test_what_goes_first_goes_in_the_order_in_which_it_was_given_up() -> None:
    node = Node(num_blocks=4)
    node.cache(X)
    node.cache(A, B)
    node.hears(B)
    node.hears(A)
    assert node.pool.cold_end(4) == [B, A, X], "a parent that went before would take its children along"


def test_what_host_memory_has_is_still_reached() -> None:
    node = Node(num_blocks=4)
    node.spare = SpareBlocks(node.pool, node.kept, lambda block_hash: block_hash == A)
    node.cache(X)
    node.cache(A)
    node.hears(A, X)
    assert node.given_up == [X]


def test_blocks_that_hold_nothing_are_still_the_first() -> None:
    node = Node(num_blocks=7)
    node.cache(X, Y)
    node.cache(A, B)
    empty = [node.pool.allocate(1), node.pool.allocate(1)]
    for blocks in empty:
        assert blocks is not None
        node.pool.free(blocks, None)
    node.hears(A, B)
    assert node.pool.allocate(3) is not None
    assert set(node.pool.cached_hashes()) == {A, B, X, Y}
    node.pool.allocate(1)
    assert set(node.pool.cached_hashes()) == {A, X, Y}


def test_of_all_who_hold_a_block_the_last_in_order_never_gives_it_up() -> None:
    """Random prompts on three nodes, news that may be old by then: whoever gives up, somebody behind had it."""
    for seed in range(20):
        rng = random.Random(seed)
        nodes = [Node(name) for name in ("a", "b", "c")]
        chains = [[bytes([letter, depth]) * 8 for depth in range(4)] for letter in b"pqrst"]
        for _ in range(200):
            node = rng.choice(nodes)
            if rng.random() < 0.6:
                node.cache(*rng.choice(chains)[: rng.randint(1, 4)])
                continue
            behind = [other for other in nodes if other is not node and gives_way(node.name, other.name)]
            held = {each for other in behind for each in other.pool.cached_hashes()}
            node.given_up.clear()
            node.hears(*held)
            assert held.issuperset(node.given_up)
            assert behind or not node.given_up, "the last leaves nothing to anybody"
        assert any(node.spare.num_given_up for node in nodes)
