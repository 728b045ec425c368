"""Blocks with window blocks: who needs them, what is found, and what becomes free when
(docs/sliding_windows.md#layers-of-both-kinds)."""

from __future__ import annotations

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.kv_layout import KVGroup, LayerPlace, places_of_layers

BLOCK, EACH = 4, 2


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, True, window=BlockWindow(2 * BLOCK, BLOCK, EACH))


def name(index: int) -> bytes:
    return bytes([index]) * 16


def cached(pool: BlockPool, num: int, first: int = 0) -> list[int]:
    """A sequence of so many blocks that has ended, having passed none of their window blocks."""
    blocks = pool.allocate(num)
    assert blocks is not None
    for index, block_id in enumerate(blocks, first):
        pool.register(block_id, name(index), name(index - 1) if index > first else None)
    pool.free(blocks, None)
    return blocks


def test_a_block_takes_its_window_blocks_along_and_gives_them_back() -> None:
    pool = pool_of(9)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.num_free == 0
    assert all(len(pool.windows.of(block_id)) == EACH for block_id in blocks)
    pool.windows.pass_by(blocks[:2], None)
    assert pool.num_free == 2 * EACH
    pool.check_integrity()
    pool.free(blocks, None, num_passed=2)
    assert pool.num_free == 9
    pool.check_integrity()


def test_bare_blocks_take_only_themselves() -> None:
    pool = pool_of(9)
    assert pool.cost(4, 3) == 4 + EACH
    blocks = pool.allocate_grantable(4, 3)
    assert blocks is not None
    assert [len(pool.windows.of(block_id)) for block_id in blocks] == [0, 0, 0, EACH]
    assert pool.num_free == 3
    pool.free(blocks, None)
    pool.check_integrity()


def test_window_blocks_are_others_once_nobody_needs_them_and_come_back_while_they_are_not() -> None:
    pool = pool_of(9)
    mine = pool.allocate(2)
    assert mine is not None
    pool.touch(mine)  # somebody shares them
    pool.windows.pass_by(mine, None)
    assert pool.num_free == 3, "the other needs them"
    pool.windows.pass_by(mine, None)
    assert pool.num_free == 3 + 2 * EACH
    assert not any(map(pool.windows.is_whole, mine)), "nobody would find what is in them"
    pool.free(mine, None, 2)
    pool.free(mine, None, 2)
    blocks = cached(pool, 2)
    assert pool.num_unused(blocks) == 2 * (1 + EACH)
    pool.touch(blocks, 1)
    assert pool.num_free == 9 - 2 - EACH, "the first one's are not needed"
    pool.check_integrity()
    pool.free(blocks, None, 1)
    pool.check_integrity()


def test_a_hit_ends_where_its_window_is_whole() -> None:
    pool = pool_of(15)
    blocks = cached(pool, 5)
    usable = pool.windows.usable
    assert usable(blocks) == blocks
    pool.windows.reuse(pool.windows.of(blocks[4])[0])
    assert usable(blocks) == blocks[:4]
    pool.windows.reuse(pool.windows.of(blocks[2])[1])
    assert usable(blocks) == blocks[:2], "behind the fourth a row would see the third"
    assert pool.windows.num_usable(4, lambda index: blocks[index]) == 2
    pool.check_integrity()


def test_a_block_without_its_window_blocks_is_found_until_a_whole_one_comes() -> None:
    pool = pool_of(12)
    blocks = cached(pool, 2)
    pool.drain_events()
    pool.windows.reuse(pool.windows.of(blocks[0])[0])
    assert pool.match_prefix([name(0), name(1)]) == blocks
    again = pool.allocate(1)
    assert again is not None
    assert not pool.register(again[0], name(0), None, None)
    assert pool.match_prefix([name(0), name(1)]) == [again[0], blocks[1]], "what is behind it stays"
    assert pool.block_hash(blocks[0]) is None
    assert pool.drain_events() == [], "others know it as they did"
    pool.free(again, None)
    pool.check_integrity()
    pool.flush()
    assert sorted(event.block_hash for event in pool.drain_events()) == [name(0), name(1)]


def test_a_block_that_takes_anothers_place_is_others_once_its_step_has_run() -> None:
    pool = pool_of(9)
    blocks = cached(pool, 1)
    pool.windows.reuse(pool.windows.of(blocks[0])[0])
    pool.drain_events()
    again = pool.allocate(1)
    assert again is not None
    pool.step_launched(7)
    pool.register(again[0], name(0), None, 7)
    assert not pool.is_published(name(0))
    pool.check_integrity()
    pool.step_completed(7)
    assert pool.is_published(name(0))
    assert pool.drain_events() == []
    pool.free(again, 7)
    pool.spoil(again)
    assert pool.drain_events() == [BlockEvent(name(0), stored=False, was_whole=True)]
    pool.check_integrity()


def test_a_block_that_a_step_still_writes_keeps_its_place() -> None:
    """What comes later would else be found, and copied, when the first one's step has run."""
    pool = pool_of(9)
    first, again = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert again is not None
    pool.step_launched(7)
    pool.register(first[0], name(0), None, 7)
    pool.windows.pass_by(first, 7)
    pool.windows.reuse(pool.windows.of(first[0])[0])
    pool.step_launched(8)
    pool.register(again[0], name(0), None, 8)
    assert pool.match_prefix([name(0)]) == first
    pool.step_completed(7)
    assert pool.is_published(name(0))
    assert pool.block_hash(again[0]) is None
    pool.check_integrity()


def test_what_is_near_its_end_is_named_by_its_block() -> None:
    """So it is saved whole before the first of its window blocks is reused."""
    pool = pool_of(9)
    blocks = pool.allocate(2)
    assert blocks is not None
    for index, block_id in enumerate(blocks):
        pool.register(block_id, name(index), name(index - 1) if index else None)
    pool.windows.pass_by(blocks[:1], None)
    assert pool.cold_end(9) == [name(0)]
    pool.free(blocks, None, 1)
    assert pool.cold_end(9) == [name(0), name(1)]
    pool.check_integrity()


def test_steps_may_still_write_what_slid_out() -> None:
    pool = pool_of(6)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.step_launched(3)
    pool.windows.pass_by(blocks, 3)
    assert (pool.num_free, pool.num_grantable) == (2 * EACH, 0)
    pool.step_completed(3)
    assert pool.num_grantable == 2 * EACH
    pool.check_integrity()
    pool.free(blocks, 3, 2)


@pytest.mark.parametrize(
    ("windows", "places"),
    [
        ([None, None], ()),
        ([8, 8], ()),
        ([8, None, None], ()),
        ([8, None], (LayerPlace(1, 0), LayerPlace(0, 0))),
        ([None, 8, None, 8], (LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(0, 1), LayerPlace(1, 1))),
        ([8, 8, 8, None], (LayerPlace(1, 0), LayerPlace(2, 0), LayerPlace(3, 0), LayerPlace(0, 0))),
    ],
)
def test_layers_share_blocks_with_as_many_of_their_kind_as_see_everything(
    windows: list[int | None], places: tuple[LayerPlace, ...]
) -> None:
    assert places_of_layers(windows) == places


@pytest.mark.parametrize(
    ("windows", "num_layers", "num_tables"),
    [
        ([None, None, 8, None], 0, 0),  # as without the head: layers that see everything are more than the others
        ([8, 8, None], 0, 0),  # all of the model's own slide
        ([None, 8, None, 8, None], 3, 2),  # GPT-OSS: one more than slides
        ([8, None, None], 2, 2),
        ([8, 8, 8, None, None], 2, 3),  # a larger block takes more layers that slide, in fewer window blocks
        ([*([8] * 5 + [None]) * 10, 8, 8, None], 11, 6),  # Gemma-3 with 27 billion: 52 of 55 places are taken
    ],
)
def test_a_heads_layer_has_its_place_in_the_block(windows: list[int | None], num_layers: int, num_tables: int) -> None:
    places = places_of_layers(windows, num_heads=1)
    assert (1 + max((each.layer for each in places), default=-1)) == num_layers
    assert len({each.table for each in places}) == num_tables
    if places:
        assert places[-1] == LayerPlace(0, num_layers - 1)
        assert len(set(places)) == len(places) == len(windows)
        assert [each.table == 0 for each in places] == [window is None for window in windows]
    group = KVGroup(num_layers=num_layers, num_kv_heads=1, head_dim=2, dtype="float32", places=places)
    assert group.blocks_each == max(1, num_tables)
