"""What peers are asked about blocks that have window blocks, and what they are told."""

from __future__ import annotations

import random

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.question import question_about
from tandem.kv_connector.directory.records import WHOLE
from tandem.kv_connector.directory.whole_blocks import WholeBlocks

A, B, C = (bytes([letter]) * 16 for letter in b"abc")


def pool_of(num_blocks: int, num_before: int) -> BlockPool:
    return BlockPool(num_blocks, True, window=BlockWindow(num_before + 1, 1, 1))


def cache(pool: BlockPool, *chain: bytes, step: int | None = None) -> None:
    """Has these cached, with window blocks where they had lost theirs."""
    hits = pool.windows.usable(pool.match_prefix(chain))
    pool.touch(hits)
    blocks = pool.allocate(len(chain) - len(hits))
    assert blocks is not None
    for index, block_id in enumerate(blocks, len(hits)):
        pool.register(block_id, chain[index], chain[index - 1] if index else None, step)
    pool.free([*hits, *blocks], step)


def bare(pool: BlockPool, block_hash: bytes) -> None:
    block_id = pool.find(block_hash)
    assert block_id is not None
    pool.windows.reuse(pool.windows.of(block_id)[0])


# --- questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_peer_has_an_end_where_a_pool_like_it_finds_one(num_before: int) -> None:
    """Random trees of which random blocks are bare, asked about in any order."""
    num_ends = num_others = 0
    for seed in range(40):
        rng = random.Random(seed)
        chains: list[list[bytes]] = [[]]
        for number in range(20):
            chains.append([*rng.choice(chains), bytes([number]) * 16])
        pool = pool_of(200, num_before)
        for chain in chains[1:]:
            cache(pool, *chain)
        held = {chain[-1] for chain in chains[1:]}
        whole = {each for each in held if rng.random() < 0.7}
        for each in held - whole:
            bare(pool, each)
        asked = rng.sample(sorted(held), rng.randint(1, len(held)))
        question = question_about(pool, asked)
        ends = question.ends(held, {each for each in question.parent_of if each in whole})
        for chain in chains[1:]:
            is_end = len(pool.windows.usable(pool.match_prefix(chain))) == len(chain)
            assert (chain[-1] in ends) == (is_end and chain[-1] in asked)
        num_ends, num_others = num_ends + len(ends), num_others + len(asked) - len(ends)
    assert num_ends
    assert bool(num_others) == (num_before > 0)


def test_no_more_is_asked_and_looked_at_than_rows_see_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [index.to_bytes(16, "big") for index in range(300)]
    pool = pool_of(700, 64)
    cache(pool, *chain)
    looks: list[bytes] = []
    parent = pool.parent
    monkeypatch.setattr(pool, "parent", lambda block_hash: (looks.append(block_hash), parent(block_hash))[1])
    for asked in (chain[200:], chain[:199:-1]):
        looks.clear()
        assert set(question_about(pool, asked).parent_of) == set(chain[200 - 63 :])
        assert len(looks) < 4 * len(asked), "a window was looked through for each of its blocks"


def test_where_blocks_have_no_window_blocks_all_that_is_held_is_an_end() -> None:
    pool = BlockPool(8, True)
    for index, each in enumerate((A, B)):
        [block_id] = pool.allocate(1) or []
        pool.register(block_id, each, A if index else None)
    question = question_about(pool, (A, B))
    assert not question.parent_of
    assert question.ends({A}, ()) == {A}


# --- what peers are told ----------------------------------------------------------------------------------------


def told(whole: WholeBlocks, pool: BlockPool, *events: BlockEvent) -> dict[bytes, bool]:
    news = whole.on_turn([*pool.drain_events(), *events])
    assert all(each.tier == WHOLE for each in news)
    return {each.block_hash: each.stored for each in news}


def test_peers_hear_which_blocks_lose_their_window_blocks_and_get_others() -> None:
    pool = pool_of(8, 1)
    whole = WholeBlocks(pool)
    cache(pool, A, B)
    assert told(whole, pool) == {A: True, B: True}
    bare(pool, A)
    assert told(whole, pool) == {A: False}
    assert told(whole, pool) == {}
    pool.step_launched(1)
    cache(pool, A, step=1)
    assert told(whole, pool) == {A: False}, "its step has not completed"
    pool.step_completed(1)
    assert told(whole, pool) == {A: True}
    pool.flush()
    assert told(whole, pool) == {A: False, B: False}


def test_what_host_memory_has_with_its_window_blocks_is_whole() -> None:
    pool, below = pool_of(8, 1), {A}
    whole = WholeBlocks(pool, below.__contains__)
    cache(pool, A, B)
    told(whole, pool)
    bare(pool, A)
    bare(pool, B)
    assert told(whole, pool) == {A: True, B: False}
    below.clear()
    assert told(whole, pool, BlockEvent(A, False, "cpu")) == {A: False}
