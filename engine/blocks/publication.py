"""Decides when others hear of a cached block: once the step that writes its last token has completed, parents first.

Part of BlockPool, which says what is stored, what is removed and how far steps have come. It knows hashes only.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.engine.contracts.directory import BlockEvent

NO_STEP = -1


class BlockPublication:
    """The state of each hash: it awaits a step, or it is published and an event told so, or it is not cached."""

    def __init__(self) -> None:
        self._newest_completed = NO_STEP
        self._step_of: dict[bytes, int] = {}  # hash -> the step that it awaits
        self._awaiting: dict[int, list[bytes]] = {}  # step -> its hashes, perhaps with some that were removed since
        self._events: list[BlockEvent] = []
        self._rewritten: set[bytes] = set()  # of those that await a step: events told so before

    def awaits(self, block_hash: bytes) -> bool:
        return block_hash in self._step_of

    def stored(self, block_hash: bytes, parent: bytes | None, step: int) -> None:
        """Notes a block that was cached. `step` writes its last token; NO_STEP: the content is there already."""
        if parent is not None:  # parents are published before their children
            step = max(step, self._step_of.get(parent, NO_STEP))
        if step <= self._newest_completed:
            self._events.append(BlockEvent(block_hash, stored=True))
        else:
            self._await(block_hash, step)

    def rewritten(self, block_hash: bytes, step: int) -> None:
        """Notes that a published block's content is in another one from now on, whose last token `step` writes."""
        assert block_hash not in self._step_of, "others would take what is not written yet for what was told"
        if step > self._newest_completed:
            self._await(block_hash, step)
            self._rewritten.add(block_hash)

    def _await(self, block_hash: bytes, step: int) -> None:
        self._step_of[block_hash] = step
        self._awaiting.setdefault(step, []).append(block_hash)

    def removed(self, block_hash: bytes, was_whole: bool = False) -> None:
        """Notes that a block is cached no more. `was_whole`: it had window blocks to the end."""
        was_told = self._step_of.pop(block_hash, None) is None or block_hash in self._rewritten
        self._rewritten.discard(block_hash)
        if was_told:
            self._events.append(BlockEvent(block_hash, stored=False, was_whole=was_whole))

    def completed(self, step_id: int) -> None:
        """Publishes what awaited steps up to `step_id`, whose writes have all landed."""
        self._newest_completed = step_id
        for step in sorted(step for step in self._awaiting if step <= step_id):
            for block_hash in self._awaiting.pop(step):
                if self._step_of.get(block_hash) == step:
                    del self._step_of[block_hash]
                    if block_hash not in self._rewritten:
                        self._events.append(BlockEvent(block_hash, stored=True))
                    self._rewritten.discard(block_hash)

    def from_step(self, step_id: int) -> list[bytes]:
        """Hashes that await `step_id` or a later step."""
        return [block_hash for block_hash, step in self._step_of.items() if step >= step_id]

    def drain_events(self) -> list[BlockEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self, parent_of: Mapping[bytes, bytes | None]) -> None:
        """Raises AssertionError when an invariant does not hold. `parent_of`: every cached hash -> its parent."""
        assert self._step_of.keys() <= parent_of.keys(), "an evicted block waits to be published"
        for block_hash, parent in parent_of.items():
            is_told = parent is None or parent in self._rewritten
            parent_step = NO_STEP if is_told else self._step_of.get(parent, NO_STEP)  # type: ignore[arg-type]
            is_later = parent_step <= self._step_of.get(block_hash, NO_STEP)
            assert is_later or parent_step <= self._newest_completed, "a child is published before its parent"
