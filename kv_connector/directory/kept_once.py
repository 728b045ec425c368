"""A node's part in keeping blocks once (docs/kept_once.md), used by the step loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.directory.spare_blocks import SpareBlocks
from tandem.kv_connector.directory.whole_blocks import WholeBlocks


def in_no_tier(block_hash: bytes) -> bool:
    """What holds of any block without tiers."""
    return False


class KeptOnce:
    """What the pool gives up since peers keep it, and what peers are told so that they can do the same."""

    def __init__(
        self,
        pool: BlockPool,
        kept: KeptElsewhere,
        is_only_way: Callable[[bytes], bool] = in_no_tier,
        is_whole_below: Callable[[bytes], bool] = in_no_tier,
    ) -> None:
        """`is_only_way` and `is_whole_below` are TierManager's."""
        self.spare = SpareBlocks(pool, kept, is_only_way)
        self._whole = WholeBlocks(pool, is_whole_below) if pool.windows.num_each else None

    def on_turn(self, events: Sequence[BlockEvent]) -> list[BlockEvent]:
        """Takes what the directory hears after a turn. Returns what it is to hear as well."""
        self.spare.on_turn()
        return [] if self._whole is None else self._whole.on_turn(events)

    def counters(self) -> dict[str, float]:
        return self.spare.counters()
