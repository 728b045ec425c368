"""Finds the nodes of a cluster by their leases. Pure: observations in, changes out.

Absent from Redis means unknown, not dead. A node whose lease is missing counts as removed only after it was missing
for `grace_s`, so that an emptied or restarted Redis, to which the nodes return, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.records import NodeRecord


@dataclass(frozen=True)
class NodeChange:
    """A node's record appeared (new, or back with another epoch), or it is gone from its address."""

    present: bool
    record: NodeRecord  # when gone: the last that was known
    is_address_taken: bool = False  # when gone: another node is there by now

    @property
    def address(self) -> str:
        return self.record.control_address


@dataclass
class Discovery:
    """The nodes that are known, by id. `grace_s`: how long a lease may be missing before its node counts as removed."""

    grace_s: float
    records: dict[str, NodeRecord] = field(default_factory=dict)
    _seen_at: dict[str, float] = field(default_factory=dict)

    def observe(self, present: Iterable[NodeRecord], now: float) -> list[NodeChange]:
        """Takes a full sweep over the leases that Redis holds now, at `now` in monotonic seconds."""
        changes: list[NodeChange] = []
        for record in present:
            changes += self.up(record, now)
        for node_id, seen_at in list(self._seen_at.items()):
            if now - seen_at > self.grace_s:
                changes += self._remove(node_id)
        return changes

    def up(self, record: NodeRecord, now: float) -> list[NodeChange]:
        """Takes one lease that was seen or announced."""
        known = self.records.get(record.node_id)
        self.records[record.node_id] = record
        self._seen_at[record.node_id] = now
        if known is None:
            return [NodeChange(True, record)]
        changes = []
        if known.control_address != record.control_address:
            changes.append(self._gone(known))
        if changes or known.epoch != record.epoch:
            changes.append(NodeChange(True, record))
        return changes

    def left(self, owner: NodeKey) -> list[NodeChange]:
        """Takes a node's goodbye. One of an older epoch comes late and changes nothing."""
        known = self.records.get(owner.node_id)
        return self._remove(owner.node_id) if known is not None and known.owner == owner else []

    def unreachable(self, now: float) -> None:
        """Notes that Redis can't be read: until it can, no node counts as missing."""
        for node_id in self._seen_at:
            self._seen_at[node_id] = now

    def _remove(self, node_id: str) -> list[NodeChange]:
        del self._seen_at[node_id]
        return [self._gone(self.records.pop(node_id))]

    def _gone(self, record: NodeRecord) -> NodeChange:
        """The change by which a node is gone. Its address may be taken: a node that was started again there can have
        another name, and be known before the old one is forgotten."""
        addresses = {other.control_address for other in self.records.values()}
        return NodeChange(False, record, is_address_taken=record.control_address in addresses)
