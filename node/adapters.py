"""What a node tells routers of adapters: whether it can serve one, and what any router has said of names. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapter_table import AdapterTable
from tandem.engine.contracts.wire.adapters import NONE_HELD, AdapterLoaded, Adapters, HeldAdapters, LoadAdapter
from tandem.engine.contracts.wire.parts import Message
from tandem.node.control.events import Found


def nothing_held() -> HeldAdapters:
    return NONE_HELD


class AdapterDesk:
    """Answers routers about adapters, and passes on what it hears of their names. `held`: what is in memory now."""

    def __init__(self, held: Callable[[], HeldAdapters] = nothing_held) -> None:
        self.table, self.held = AdapterTable(), held
        self._routers: set[NodeKey] = set()
        self._outbox: list[tuple[NodeKey, Message]] = []

    def router_up(self, router: NodeKey) -> None:
        self._routers.add(router)

    def router_lost(self, router: NodeKey) -> None:
        self._routers.discard(router)

    def on_load(self, router: NodeKey, message: LoadAdapter, found: Found) -> None:
        digest = b"" if found.adapter is None else found.adapter.digest
        answer = AdapterLoaded(path=message.path, stamp=message.stamp, digest=digest, problem=found.problem)
        self._outbox.append((router, answer))

    def on_names(self, router: NodeKey, message: Adapters) -> None:
        """Merges what a router knows of names; whoever knows less hears of it."""
        changed = self.table.merge(message.entries)
        own = Adapters(entries=self.table.entries)
        if own.entries != message.entries:
            self._outbox.append((router, own))
        if changed:
            self._outbox += [(other, own) for other in sorted(self._routers - {router})]

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox
