"""How routers learn where nodes are: a fixed list of addresses, or a stream of events (Redis)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class NodeEvent(Protocol):
    """A node's record appeared at a control address, or is gone from there."""

    @property
    def address(self) -> str: ...

    @property
    def present(self) -> bool: ...


class NodeDiscovery(Protocol):
    """A source of node records. `watch` never ends, and never raises because its source is down: it waits, and then
    repeats what it finds.

    An absent record means unknown, not dead: the router goes on using a node that it can reach.
    """

    def watch(self) -> AsyncIterator[NodeEvent]: ...
