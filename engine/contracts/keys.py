"""What nodes and routers call each other, and what they call what they work on."""

from __future__ import annotations

from typing import NamedTuple


class NodeKey(NamedTuple):
    """One life of a process, a node's or a router's: `epoch` is a random u64, new at each start."""

    node_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.node_id}@{self.epoch:016x}"


class AttemptKey(NamedTuple):
    """One try of one request, or one hand-off between two nodes that no router asked for."""

    request_id: str
    attempt: int
