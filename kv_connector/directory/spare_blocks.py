"""Has a pool reuse first what peers surely keep. Pure; docs/kept_once.md."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.blocks.pool import BlockPool
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.directory.question import is_whole_in, question_about

COLDER_SHARE = 0.5  # of a pool, in which what peers keep is not kept; docs/simulator.md#kept-once
ASKED_AT_ONCE = 4096  # blocks, of which Redis is asked for each peer once a second; docs/simulator.md#kept-once


class SpareBlocks:
    """Asks about blocks as they come into the colder half of a pool, and when the answer is there has what peers keep
    of them reused before all else. Used by the step loop."""

    def __init__(
        self, pool: BlockPool, kept: KeptElsewhere, is_only_way: Callable[[bytes], bool] = lambda block_hash: False
    ) -> None:
        """`is_only_way`: whether lower tiers have what is reached through that block, and not all of the block."""
        self._pool, self.kept, self._is_only_way = pool, kept, is_only_way
        self._num_answers = 0
        self.num_given_up = 0

    def counters(self) -> dict[str, float]:
        return {"tier_blocks_given_up": self.num_given_up}

    def on_turn(self) -> None:
        if self.kept.num_answers == self._num_answers:
            return
        self._num_answers = self.kept.num_answers
        spare = self._spare() if self._pool.cold_end(ASKED_AT_ONCE) else []  # else enough blocks hold nothing
        self._pool.reuse_first(spare)
        self.num_given_up += len(spare)
        colder = self._pool.cold_end(ASKED_AT_ONCE, newest_of_colder(self._pool.num_blocks))
        self.kept.ask_about_colder(question_about(self._pool, colder))

    def _spare(self) -> list[bytes]:
        """The blocks of the question that peers keep, too, children first. Nothing stays that is reached through them:
        what was given up before and not used since goes before them."""
        pool, spare = self._pool, dict[bytes, None]()
        for block_hash in self.kept.colder.hashes:
            is_new = pool.is_unused(block_hash) and not pool.goes_first(block_hash)
            if not is_new or not is_kept(self.kept, pool, block_hash) or self._is_only_way(block_hash):
                continue
            if all(child in spare or pool.goes_first(child) for child in pool.children(block_hash)):
                spare[block_hash] = None
        return list(spare)


def is_kept(kept: KeptElsewhere, pool: BlockPool, block_hash: bytes) -> bool:
    """Whether a peer keeps what this pool has of a block. Nothing is found here by one that lacks its window blocks;
    what ends in one that has them must be found at the peer."""
    return kept.is_end(block_hash) if is_whole_in(pool, block_hash) else block_hash in kept


def newest_of_colder(num_blocks: int, at_once: int = ASKED_AT_ONCE) -> int:
    """How many blocks are reused before those that came into the colder half last."""
    return max(0, int(COLDER_SHARE * num_blocks) - at_once)
