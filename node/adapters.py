"""What a node tells routers of adapters: whether it can serve one, and what any router has said of names. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapter_table import AdapterTable
from tandem.engine.contracts.wire.adapters import (
    NONE_HELD,
    AdapterLoaded,
    Adapters,
    AdaptersKnown,
    HeldAdapters,
    LoadAdapter,
)
from tandem.engine.contracts.wire.parts import Message
from tandem.node.control.events import Found


def nothing_held() -> HeldAdapters:
    return NONE_HELD


@dataclass
class _Spread:
    """A router waits until `others` know what it said of names."""

    router: NodeKey
    ask: int
    others: set[NodeKey]


class AdapterDesk:
    """Answers routers about adapters, and passes on what it hears of their names. `held`: what is in memory now."""

    def __init__(self, held: Callable[[], HeldAdapters] = nothing_held) -> None:
        self.table, self.held = AdapterTable(), held
        self._routers: set[NodeKey] = set()
        self._spreads: dict[int, _Spread] = {}  # by the number under which the others were asked
        self._num_spreads = 0
        self._outbox: list[tuple[NodeKey, Message]] = []

    def router_up(self, router: NodeKey) -> None:
        self._routers.add(router)

    def router_lost(self, router: NodeKey) -> None:
        self._routers.discard(router)
        for number, spread in list(self._spreads.items()):
            if spread.router == router:
                del self._spreads[number]
            else:
                self._knows(number, router)

    def on_load(self, router: NodeKey, message: LoadAdapter, found: Found) -> None:
        digest = b"" if found.adapter is None else found.adapter.digest
        answer = AdapterLoaded(path=message.path, stamp=message.stamp, digest=digest, problem=found.problem)
        self._outbox.append((router, answer))

    def on_names(self, router: NodeKey, message: Adapters) -> None:
        """Merges what a router knows of names; whoever knows less hears of it, and a router that asks hears when all
        others do."""
        changed = self.table.merge(message.entries)
        own = Adapters(entries=self.table.entries)
        if own.entries != message.entries:
            self._outbox.append((router, own))
        others = self._routers - {router}
        if message.ask:
            self._num_spreads += 1
            self._spreads[self._num_spreads] = _Spread(router, message.ask, others)
            asking = Adapters(entries=own.entries, ask=self._num_spreads)
            self._outbox += [(other, asking) for other in sorted(others)]
            self._knows(self._num_spreads, router)
        elif changed:
            self._outbox += [(other, own) for other in sorted(others)]

    def on_known(self, router: NodeKey, message: AdaptersKnown) -> None:
        self._knows(message.ask, router)

    def _knows(self, number: int, router: NodeKey) -> None:
        spread = self._spreads.get(number)
        if spread is None:
            return
        spread.others.discard(router)
        if not spread.others:
            del self._spreads[number]
            self._outbox.append((spread.router, AdaptersKnown(ask=spread.ask)))

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox
