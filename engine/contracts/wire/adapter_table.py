"""What names of adapters stand for in a cluster. Pure.

Routers and nodes each have a table; two tables merge by the later word on each name, in whatever order they meet, so
that all become equal. A name that was unloaded stays as such, or an older table would bring it back.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.contracts.wire.adapters import AdapterEntry
from tandem.engine.contracts.wire.parts import AdapterRef

MAX_ENTRIES = 10_000  # a guess: beyond, what was unloaded first is forgotten


class AdapterTable:
    """The latest word on each adapter's name, one entry a name."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        return tuple(self._entries[name] for name in sorted(self._entries))

    def find(self, name: str) -> AdapterEntry | None:
        """The latest word on a name, be it that it stands for nothing; None: nobody has said anything."""
        return self._entries.get(name)

    def merge(self, entries: Iterable[AdapterEntry]) -> bool:
        """Takes in what is later than what is known. Returns whether anything was."""
        changed = False
        for entry in entries:
            known = self._entries.get(entry.name)
            if known is None or _order(entry) > _order(known):
                self._entries[entry.name] = entry
                changed = True
        unloaded = sorted((e for e in self._entries.values() if not e.path), key=lambda e: e.stamp)
        for entry in unloaded[: max(0, len(self._entries) - MAX_ENTRIES)]:
            del self._entries[entry.name]
        return changed

    def next_stamp(self, name: str, now_ns: int) -> int:
        """A stamp later than the latest word on a name, whatever the clocks of others say."""
        known = self._entries.get(name)
        return max(now_ns, 0 if known is None else known.stamp + 1)


def ref_of(entry: AdapterEntry) -> AdapterRef | None:
    return AdapterRef(entry.path, entry.digest) if entry.path else None


def _order(entry: AdapterEntry) -> tuple[int, str, bytes]:
    return entry.stamp, entry.path, entry.digest
