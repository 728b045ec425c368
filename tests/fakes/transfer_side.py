"""A small node with its transfer thread, for tests of what goes from one such thread to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVReady
from tandem.kv_connector.transfer.thread import TransferWorker
from tests.fakes.kv_pools import PoolNode


class Side:
    """A node with its transfer thread; keeps all that the thread says."""

    def __init__(self, node: PoolNode, fault_injection: str = "", connect=None) -> None:
        self.node = node
        self.events: list[object] = []
        self.sent: list[tuple[NodeKey, KVReady]] = []
        self.lost: list[tuple[NodeKey, str]] = []
        self.transfer = TransferWorker(
            node.pool,
            node.layout,
            node.info.key,
            connect or (lambda peer, on_lost: node.transports.connect(node.info, peer, on_lost)),
            self.events.append,
            lambda to, message: self.sent.append((to, message)),
            lambda *what: self.lost.append(what),
            fault_injection,
        )
        self.transfer.start()

    def events_of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type, count: int = 1):
        wait_until(lambda: len(self.events_of(kind)) >= count, f"{kind.__name__} number {count}")
        return self.events_of(kind)[count - 1]


class Pairs:
    """Makes sources that are connected to sinks of their own."""

    def __init__(self) -> None:
        self.made: list[Side] = []

    def make(self, source: PoolNode, sink: PoolNode, fault_injection: str = "") -> tuple[Side, Side]:
        sides = Side(source, fault_injection), Side(sink)
        self.made += sides
        sink.admit(source.info)
        sides[0].transfer.connect_peer(sink.info)
        return sides


@contextmanager
def pairs() -> Iterator[Pairs]:
    """At the end each transfer thread stops in time."""
    made = Pairs()
    yield made
    for side in made.made:
        assert side.transfer.stop(PATIENCE_S)
        side.node.close()
