"""The directory of single-node mode: publisher and reader in one object, no Redis."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.interfaces import BlockEvent
from tandem.kv_connector.directory.mirror import Mirror
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.records import Owner


class InProcessDirectory:
    """Implements DirectoryPublisher and DirectoryReader for one owner. Publishing and reading from one thread."""

    def __init__(self, node_id: str, epoch: int) -> None:
        self._view = OwnView((node_id, epoch))
        self._mirror = Mirror()
        self._mirror.adopt((node_id, epoch))

    def publish(self, events: Sequence[BlockEvent]) -> None:
        self._view.record(events)
        for batch in self._view.number(self._view.take()):
            self._mirror.apply(batch)

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[Owner, int]:
        return self._mirror.longest_prefix(block_hashes)

    def close(self) -> None:
        for node_id, _ in self._mirror.owners():
            self._mirror.drop(node_id)
