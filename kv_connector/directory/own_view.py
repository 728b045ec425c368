"""A node's own account of the blocks it holds, and of the changes that Redis does not know yet. Pure.

Redis may be away, paused or emptied at any time; this view is what everything is published from, so it is complete
and always current. Pending changes are bounded: when more pile up than `max_pending`, the next thing to publish is
the whole view again, which is never more than the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.records import PUBLISHED, TIERS, Batch, TierChange, join_hashes

MAX_PENDING = 65_536  # events that wait for Redis before a whole republication is cheaper to keep; a guess
BATCH_HASHES = 4_096  # hashes in one batch: 64 KiB on the wire; a guess


@dataclass(frozen=True)
class Changes:
    """Changes to be published: the whole view (`held`, by tier) or the events since the last time."""

    whole: bool
    events: list[BlockEvent]
    held: dict[str, list[bytes]]


class OwnView:
    """Held hashes by tier in the order in which they were stored, so parents come before their children.

    Not thread-safe: the publisher guards `record`, `publish_all_again` and `take` with a lock. Under it an event costs
    a dict operation, and taking the whole view a list copy (5 ms per million hashes).
    """

    def __init__(self, owner: NodeKey, max_pending: int = MAX_PENDING) -> None:
        self.owner = owner
        self.generation = 0
        self.sequence = 0
        self.num_overflows = 0
        self._max_pending = max_pending
        self._held: dict[str, dict[bytes, None]] = {tier: {} for tier in PUBLISHED}
        self._pending: list[BlockEvent] = []
        self._whole = True  # the next batch starts a whole publication

    def record(self, events: Iterable[BlockEvent]) -> None:
        """Takes events in. Storing a block that is held, or removing one that is not, changes nothing."""
        for event in events:
            held = self._held[event.tier]
            if event.stored == (event.block_hash in held):
                continue
            if event.stored:
                held[event.block_hash] = None
            else:
                del held[event.block_hash]
            if not self._whole:
                self._pending.append(event)
        if len(self._pending) > self._max_pending:
            self.num_overflows += 1
            self.publish_all_again()

    def publish_all_again(self) -> None:
        """Makes everything pending once more, since Redis may not hold what it was told."""
        self._pending.clear()
        self._whole = True

    def has_pending(self) -> bool:
        return self._whole or bool(self._pending)

    def take(self) -> Changes:
        """Takes out everything that Redis has not been told. The caller must either write all of it or call
        `publish_all_again`."""
        if self._whole:
            self._whole = False
            return Changes(True, [], {tier: list(held) for tier, held in self._held.items()})
        events, self._pending = self._pending, []
        return Changes(False, events, {})

    def number(self, changes: Changes) -> list[Batch]:
        """The changes as batches, in the order in which they must be written. Needs no lock: only one thread calls
        it."""
        if changes.whole:
            self.generation += 1
            return list(self._whole_batches(changes.held))
        return [self._batch(_coalesce(chunk)) for chunk in _chunks(changes.events)]

    def num_held(self) -> int:
        return sum(len(self._held[tier]) for tier in TIERS)

    def _whole_batches(self, held_by_tier: dict[str, list[bytes]]) -> Iterator[Batch]:
        yield self._batch((), reset=True)
        for tier, held in held_by_tier.items():
            for chunk in _chunks(held):
                yield self._batch((TierChange(tier, stored=join_hashes(chunk)),))

    def _batch(self, changes: tuple[TierChange, ...], reset: bool = False) -> Batch:
        self.sequence += 1
        node_id, epoch = self.owner
        return Batch(
            node_id=node_id,
            epoch=epoch,
            generation=self.generation,
            sequence=self.sequence,
            reset=reset,
            changes=changes,
        )

    def check_integrity(self) -> None:
        assert not (self._whole and self._pending), "a whole publication leaves nothing pending beside it"
        assert len(self._pending) <= self._max_pending
        newest = {(event.tier, event.block_hash): event.stored for event in self._pending}
        for (tier, block_hash), stored in newest.items():
            assert stored == (block_hash in self._held[tier]), "the newest pending event tells the held state"


def _chunks(items: list) -> Iterator[list]:
    return (items[start : start + BATCH_HASHES] for start in range(0, len(items), BATCH_HASHES))


def _coalesce(events: list[BlockEvent]) -> tuple[TierChange, ...]:
    """The net effect of the events: the last word on each hash, in the order of last words."""
    last: dict[tuple[str, bytes], bool] = {}
    for event in events:
        last.pop((event.tier, event.block_hash), None)
        last[event.tier, event.block_hash] = event.stored
    changes = []
    for tier in PUBLISHED:
        stored = [block_hash for (at, block_hash), held in last.items() if at == tier and held]
        removed = [block_hash for (at, block_hash), held in last.items() if at == tier and not held]
        if stored or removed:
            changes.append(TierChange(tier, join_hashes(stored), join_hashes(removed)))
    return tuple(changes)
