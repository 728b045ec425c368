"""The receiver's gate: knows which grants are open, and who is writing under them right now. Thread-safe.

Invariant: bytes of a peer go into the pool only inside `writing(...)`, and `close` returns only after every such
section of that grant has been left. Hence a closed grant's blocks can't change any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant


@dataclass(eq=False)
class GrantInUse:
    """A grant that is open, or closing while somebody still writes under it."""

    grant: KVGrant
    blocks: frozenset[int]
    closed: bool = False  # read by the writer between two pieces, to leave early
    wakers: list[Callable[[], None]] = field(default_factory=list)  # one for each writing section


class GrantTable:
    """Open grants of one sink. `num_refused` counts writes that were turned away."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, GrantInUse] = {}
        self._closing: list[GrantInUse] = []
        self._fenced: set[NodeKey] = set()
        self.num_refused = 0

    def open(self, grant: KVGrant) -> None:
        """Idempotent. Raises GrantError when the grant's source epoch has been fenced."""
        with self._changed:
            if grant.source in self._fenced:
                raise GrantError(
                    f"{grant.source_id} epoch {grant.source_epoch:#x} is fenced and may not write",
                    request_id=grant.request_id,
                )
            self._open.setdefault(grant.grant_id, GrantInUse(grant, frozenset(grant.block_ids)))

    def close(self, grant_id: int) -> None:
        """Returns when no write under the grant can land any more. Idempotent."""
        with self._changed:
            entry = self._open.pop(grant_id, None)
            if entry is None:
                entry = next((each for each in self._closing if each.grant.grant_id == grant_id), None)
            if entry is not None:
                self._close_entries([entry])

    def fence(self, source: NodeKey) -> None:
        """Closes all grants of that source epoch and bars it until `admit`. Returns when its writers have left."""
        with self._changed:
            self._fenced.add(source)
            entries = [entry for entry in [*self._open.values(), *self._closing] if entry.grant.source == source]
            for entry in entries:
                self._open.pop(entry.grant.grant_id, None)
            self._close_entries(entries)

    def admit(self, source: NodeKey) -> None:
        """Lifts the bar of a fence. Grants from before it stay closed, so late writes stay refused."""
        with self._changed:
            self._fenced.discard(source)

    def count_refusal(self) -> None:
        with self._changed:
            self.num_refused += 1

    def is_fenced(self, source: NodeKey) -> bool:
        with self._changed:
            return source in self._fenced

    @contextmanager
    def writing(
        self,
        grant_id: int,
        source: NodeKey,
        block_ids: Iterable[int],
        wake: Callable[[], None] = lambda: None,
    ) -> Iterator[GrantInUse]:
        """A context in which `source` may write `block_ids`.

        `wake` is called from the closing thread when the grant closes meanwhile; the writer must then leave soon.
        Raises GrantError when the grant is not open, belongs to another source or does not cover a block.
        """
        with self._changed:
            entry = self._admit(grant_id, source, block_ids)
            entry.wakers.append(wake)
        try:
            yield entry
        finally:
            with self._changed:
                entry.wakers.remove(wake)
                self._changed.notify_all()

    def check_integrity(self) -> None:
        with self._changed:
            for grant_id, entry in self._open.items():
                assert entry.grant.grant_id == grant_id, "grants are filed under their own id"
                assert not entry.closed, "an open grant is not closed"
                assert entry.grant.source not in self._fenced, "a fenced source holds no open grant"

    def _admit(self, grant_id: int, source: NodeKey, block_ids: Iterable[int]) -> GrantInUse:
        entry = self._open.get(grant_id)
        reason = ""
        if entry is None:
            reason = "is not open here (never given, closed, or used before)"
        elif entry.grant.source != source:
            reason = f"was given to {entry.grant.source_id}, not to {source.node_id} epoch {source.epoch:#x}"
        elif not entry.blocks.issuperset(block_ids):
            reason = f"does not cover blocks {sorted(set(block_ids) - entry.blocks)[:8]}"
        if reason or entry is None:
            self.num_refused += 1
            raise GrantError(f"grant {grant_id:#x} {reason}")
        return entry

    def _close_entries(self, entries: list[GrantInUse]) -> None:
        """Wakes the writers of `entries` and waits until they have left. The lock must be held."""
        for entry in entries:
            if not entry.closed:
                entry.closed = True
                self._closing.append(entry)
            for wake in entry.wakers:
                wake()
        self._changed.wait_for(lambda: not any(entry.wakers for entry in entries))
        self._closing = [entry for entry in self._closing if entry.wakers]
