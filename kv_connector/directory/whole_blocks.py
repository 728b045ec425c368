"""Tells the directory which blocks have their window blocks, on whatever tier of this node. Pure; docs/kept_once.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.question import is_whole_in
from tandem.kv_connector.directory.records import WHOLE


class WholeBlocks:
    """Looks again at each block of which something has changed. Used by the step loop."""

    def __init__(self, pool: BlockPool, is_whole_below: Callable[[bytes], bool] = lambda block_hash: False) -> None:
        """`is_whole_below`: whether lower tiers have that block with its window blocks."""
        self._pool, self._is_whole_below = pool, is_whole_below
        self._turned = pool.windows.watch()

    def on_turn(self, events: Sequence[BlockEvent]) -> list[BlockEvent]:
        """What the directory is to hear beside `events`, which pool and tiers told since the last call."""
        changed = dict.fromkeys((*self._turned, *(each.block_hash for each in events)))
        self._turned.clear()
        # What takes the place of a bare block is whole once its step has completed, of which no event tells.
        self._turned.update(dict.fromkeys(filter(self._is_being_written, changed)))
        return [BlockEvent(each, self._is_whole(each), WHOLE) for each in changed]

    def _is_being_written(self, block_hash: bytes) -> bool:
        return self._pool.find(block_hash) is not None and not self._pool.is_published(block_hash)

    def _is_whole(self, block_hash: bytes) -> bool:
        is_here = is_whole_in(self._pool, block_hash) and self._pool.is_published(block_hash)
        return is_here or self._is_whole_below(block_hash)
