"""The block pool: references, LRU order, cooling, hashes, publication; a random walk against a simple model."""

from __future__ import annotations

import random

import pytest

from tandem.engine.blocks.pool import BlockPool


def name(index: int) -> bytes:
    return index.to_bytes(16, "little")


def chain(pool: BlockPool, length: int, first: int = 0, step: int | None = None) -> list[int]:
    """Allocates `length` blocks and registers them as one chain of hashes."""
    blocks = pool.allocate(length)
    assert blocks is not None
    for i, block_id in enumerate(blocks):
        assert pool.register(block_id, name(first + i), name(first + i - 1) if i else None, step)
    return blocks


def stored(pool: BlockPool) -> list[tuple[int, bool]]:
    return [(int.from_bytes(event.block_hash, "little"), event.stored) for event in pool.drain_events()]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, True)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(3) or ()) == 3
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_block_is_free_when_its_last_holder_left() -> None:
    pool = BlockPool(2, True)
    [block] = pool.allocate(1) or ()
    pool.touch([block])
    pool.free([block], None)
    assert pool.num_free == 1
    pool.free([block], None)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="no holder"):
        pool.free([block], None)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="memory"):
        BlockPool(0, True)


def test_a_freed_chain_is_reused_from_its_end_and_oldest_first() -> None:
    pool = BlockPool(6, True)
    old, new = chain(pool, 3), chain(pool, 3, first=10)
    pool.free(old, None)
    pool.free(new, None)
    assert [pool.allocate(1) for _ in range(6)] == [[b] for b in (*reversed(old), *reversed(new))]


def test_use_makes_a_chain_young_again() -> None:
    pool = BlockPool(4, True)
    old, new = chain(pool, 2), chain(pool, 2, first=10)
    pool.free(old, None)
    pool.free(new, None)
    pool.touch(old)
    pool.free(old, None)
    assert pool.allocate(2) == list(reversed(new))


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, True)
    cached = chain(pool, 2)
    plain = pool.allocate(2) or []
    pool.free(cached, None)
    pool.free(plain, None)
    assert set(pool.allocate(2) or ()) == set(plain)
    assert pool.num_cached == 2


def test_prefixes_are_matched_without_side_effect() -> None:
    pool = BlockPool(4, True)
    blocks = chain(pool, 3)
    pool.free(blocks, None)
    assert pool.match_prefix([name(0), name(1), name(9), name(2)]) == blocks[:2]
    assert pool.num_free == 4
    assert pool.num_unused(blocks) == 3


def test_the_first_insert_wins() -> None:
    pool = BlockPool(2, True)
    first, second = pool.allocate(2) or ()
    assert pool.register(first, name(1))
    assert not pool.register(second, name(1))
    assert not pool.register(first, name(2)), "a block has one hash"
    assert pool.match_prefix([name(1)]) == [first]
    assert pool.is_writable(second)
    assert not pool.is_writable(first)


def test_a_shared_block_is_not_writable() -> None:
    pool = BlockPool(1, True)
    blocks = pool.allocate(1) or []
    assert pool.is_writable(blocks[0])
    pool.touch(blocks)
    assert not pool.is_writable(blocks[0])


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(1, False)
    [block] = pool.allocate(1) or ()
    assert not pool.register(block, name(1))
    assert pool.match_prefix([name(1)]) == []
    assert pool.drain_events() == []


def test_eviction_takes_descendants_along_children_first() -> None:
    """Another holder's copy of a prefix may go before its own children do."""
    pool = BlockPool(3, True)
    parent = chain(pool, 1)
    others = pool.allocate(2) or []
    assert not pool.register(others[0], name(0))
    assert pool.register(others[1], name(1), name(0))
    stored(pool)
    pool.free(parent, None)
    assert pool.allocate(1) == parent
    assert stored(pool) == [(1, False), (0, False)]
    assert pool.num_cached == 0
    assert not pool.register(others[1], name(1), name(0)), "its parent can't be found any more"
    pool.check_integrity()


def test_flush_keeps_what_is_in_use() -> None:
    pool = BlockPool(4, True)
    used, unused = chain(pool, 2), chain(pool, 2, first=10)
    pool.free(unused, None)
    stored(pool)
    pool.flush()
    assert stored(pool) == [(11, False), (10, False)]
    assert pool.match_prefix([name(0), name(1)]) == used


# --- steps --------------------------------------------------------------------------------------------------


def test_a_cooling_block_is_for_the_same_stream_only() -> None:
    pool = BlockPool(2, True)
    blocks = pool.allocate(2) or []
    pool.step_launched(5)
    pool.free(blocks[:1], 5)
    pool.free(blocks[1:], None)
    assert (pool.num_free, pool.num_grantable) == (2, 1)
    assert pool.allocate_grantable(2) is None
    assert pool.allocate_grantable(1) == blocks[1:]
    pool.step_completed(5)
    assert pool.num_grantable == 1
    assert pool.allocate_grantable(1) == blocks[:1]


def test_reuse_and_return_does_not_cool_a_block_early() -> None:
    pool = BlockPool(1, True)
    blocks = pool.allocate(1) or []
    pool.step_launched(1)
    pool.step_launched(2)
    pool.free(blocks, 2)
    assert pool.allocate(1) == blocks
    pool.free(blocks, 1)
    pool.step_completed(1)
    assert pool.num_grantable == 0, "step 2 of the first holder may still write it"
    pool.step_completed(2)
    assert pool.num_grantable == 1
    pool.check_integrity()


def test_every_holder_of_a_shared_block_counts() -> None:
    pool = BlockPool(1, True)
    blocks = pool.allocate(1) or []
    pool.touch(blocks)
    pool.step_launched(1)
    pool.free(blocks, 1)
    pool.free(blocks, None)
    assert pool.num_grantable == 0


def test_steps_complete_in_order() -> None:
    pool = BlockPool(1, True)
    pool.step_launched(0)
    pool.step_launched(1)
    pool.step_completed(1)
    with pytest.raises(AssertionError, match="out of order"):
        pool.step_completed(0)
    with pytest.raises(AssertionError, match="out of order"):
        pool.step_completed(2)
    with pytest.raises(AssertionError, match="launched after"):
        pool.step_launched(1)


def test_a_block_is_published_when_its_step_has_completed() -> None:
    pool = BlockPool(3, True)
    blocks = chain(pool, 2, step=4)
    assert pool.match_prefix([name(0), name(1)]) == blocks, "later steps of the same stream may use it"
    assert stored(pool) == []
    assert pool.cached_hashes() == []
    pool.step_launched(4)
    pool.step_completed(4)
    assert stored(pool) == [(0, True), (1, True)]
    assert pool.cached_hashes() == [name(0), name(1)]


def test_a_child_is_not_published_before_its_parent() -> None:
    """Received KV is there at once, but it continues a prefix that a step still computes."""
    pool = BlockPool(2, True)
    chain(pool, 1, step=4)
    [received] = pool.allocate(1) or ()
    assert pool.register(received, name(1), name(0))
    assert stored(pool) == []
    pool.step_launched(4)
    pool.step_completed(4)
    assert stored(pool) == [(0, True), (1, True)]


def test_what_was_never_published_is_not_removed() -> None:
    pool = BlockPool(1, True)
    blocks = chain(pool, 1, step=4)
    pool.free(blocks, 4)
    assert pool.allocate(1) == blocks
    assert pool.register(blocks[0], name(7), step=5)
    pool.step_launched(4)
    pool.step_launched(5)
    pool.step_completed(4)
    assert stored(pool) == []
    pool.step_completed(5)
    assert stored(pool) == [(7, True)]


def test_a_hash_that_comes_back_waits_for_its_new_step() -> None:
    pool = BlockPool(1, True)
    blocks = chain(pool, 1, step=4)
    pool.free(blocks, 4)
    pool.flush()
    assert pool.allocate(1) == blocks
    assert pool.register(blocks[0], name(0), step=6)
    for step in (4, 6):
        pool.step_launched(step)
    pool.step_completed(4)
    assert stored(pool) == []
    pool.step_completed(6)
    assert stored(pool) == [(0, True)]


# --- a random walk ------------------------------------------------------------------------------------------


class Walk:
    """Random holders of chains; `mirror` is what a reader of the events believes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(self.random.randint(1, 12), True)
        self.chains: list[list[int]] = []
        self.mirror: dict[bytes, bytes | None] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.step = self.completed = 0

    def act(self) -> None:
        self.random.choice([self.start, self.start, self.leave, self.grant, self.launch, self.complete, self.flush])()
        self.read_events()
        self.pool.check_integrity()
        assert 0 <= self.pool.num_grantable <= self.pool.num_free

    def start(self) -> None:
        """Hits on one of a few long prefixes, then new blocks that continue it."""
        family, length = self.random.randint(0, 2), self.random.randint(1, 5)
        hashes = [name(100 * family + i) for i in range(length)]
        hits = self.pool.match_prefix(hashes)[: self.random.randint(0, 5)]
        self.pool.touch(hits)
        new = self.pool.allocate(length - len(hits))
        if new is None:
            self.pool.free(hits, None)
            return
        blocks = hits + new
        for i in range(len(hits), length):
            parent = hashes[i - 1] if i else None
            self.parents[hashes[i]] = parent
            self.pool.register(blocks[i], hashes[i], parent, self.random.choice([None, self.step + 1]))
        self.chains.append(blocks)

    def leave(self) -> None:
        if self.chains:
            blocks = self.chains.pop(self.random.randrange(len(self.chains)))
            self.pool.free(blocks, self.random.choice([None, self.step, self.step + 1]))

    def grant(self) -> None:
        before = {b for b in range(self.pool.num_blocks) if self.pool.ref_count(b) == 0 and self.pool.is_cooling(b)}
        granted = self.pool.allocate_grantable(self.random.randint(0, 3))
        if granted is not None:
            assert not before & set(granted), "a cooling block was granted"
            self.chains.append(granted)

    def launch(self) -> None:
        self.step += 1
        self.pool.step_launched(self.step)

    def complete(self) -> None:
        if self.completed < self.step:
            self.completed += 1
            self.pool.step_completed(self.completed)

    def flush(self) -> None:
        if self.random.random() < 0.2:
            self.pool.flush()

    def read_events(self) -> None:
        for event in self.pool.drain_events():
            if event.stored:
                assert event.block_hash not in self.mirror, "stored twice"
                parent = self.parents[event.block_hash]
                assert parent is None or parent in self.mirror, "stored before its parent"
                self.mirror[event.block_hash] = parent
            else:
                assert event.block_hash in self.mirror, "removed and never stored"
                del self.mirror[event.block_hash]
                assert event.block_hash not in self.mirror.values(), "removed before its children"
        assert set(self.mirror) == set(self.pool.cached_hashes())


@pytest.mark.parametrize("seed", range(40))
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(250):
        walk.act()
    while walk.chains:
        walk.leave()
    walk.pool.check_integrity()
    assert walk.pool.num_free == walk.pool.num_blocks


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 1),
        lambda pool: pool._free._blocks.popitem(),
        lambda pool: pool._block_of.pop(name(0)),
        lambda pool: pool._hash_of.__setitem__(3, name(0)),
        lambda pool: pool._tree.parent_of.__setitem__(name(1), name(9)),
        lambda pool: pool._free.cooling._cooling.clear(),
    ],
)
def test_integrity_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(4, True)
    blocks = chain(pool, 2)
    pool.step_launched(1)
    pool.free(blocks, 1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises((AssertionError, KeyError)):
        pool.check_integrity()
