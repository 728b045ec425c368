"""What a promotion holds for its request is what that will find."""

from __future__ import annotations

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.keys import AttemptKey
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Load
from tandem.kv_connector.tiers.promoter import Promoter
from tandem.kv_connector.tiers.write_back import WriteBack

BLOCK = 4
NAMES = [bytes([index]) * 16 for index in range(5)]
TAKER = AttemptKey("request", 0)


def cached(pool: BlockPool) -> list[int]:
    """Four blocks of a sequence that has ended, the first two without their window blocks."""
    blocks = pool.allocate(4)
    assert blocks is not None
    for index, block_id in enumerate(blocks):
        pool.register(block_id, NAMES[index], NAMES[index - 1] if index else None)
    pool.free(blocks, None)
    for block_id in blocks[:2]:
        pool.windows.reuse(pool.windows.of(block_id)[0])
    return blocks


def promoted(pool: BlockPool, hits: list[int]) -> tuple[Promoter, Load]:
    """A promotion behind these hits, of one block in host memory, and its load."""
    host = TierIndex(4)
    host.reserve(NAMES[4], NAMES[3], b"")
    host.commit(NAMES[4])
    promoter = Promoter(pool, host, None, WriteBack(pool, host, None, lambda event: None, 1))
    assert promoter.promote(TAKER, hits, NAMES[3], [NAMES[4]])
    [load] = promoter.drain_jobs()
    assert isinstance(load, Load)
    return promoter, load


def test_blocks_that_others_have_taken_the_place_of_are_let_go() -> None:
    """Whether that happens before the load has ended or later; else they would take the room that their request waits
    for, which may need the whole pool."""
    for loads_first in (True, False):
        pool = BlockPool(12, True, window=BlockWindow(2 * BLOCK, BLOCK, 1))
        promoter, load = promoted(pool, cached(pool))
        if loads_first:
            promoter.on_loaded(load, JobDone(load, 0.1))
            promoter.on_turn()
            assert sum(promoter.references().values()) == 5, "what it will find"
        again = pool.allocate(1)
        assert again is not None
        pool.register(again[0], NAMES[0], None)
        pool.free(again, None)
        promoter.on_turn()
        if not loads_first:
            assert promoter.is_copying
            promoter.on_loaded(load, JobDone(load, 0.1))
        assert not promoter.references()
        assert pool.num_free == pool.num_blocks
        found = pool.match_prefix(NAMES)
        assert found[0] == again[0]
        assert len(found) == 5, "all is still there to be found"
        promoter.check_integrity()
        pool.check_integrity()
