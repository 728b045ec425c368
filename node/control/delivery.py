"""From the control plane to the step loop: what a message needs is made ready on the way, on threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapters import LoadAdapter
from tandem.engine.contracts.wire.operate import TellStory
from tandem.engine.contracts.wire.parts import AdapterRef, Message
from tandem.engine.contracts.wire.profile import StartProfile, StopProfile
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.process.workshop import Workshop
from tandem.engine.structured.grammars import Grammars
from tandem.node.control.events import ControlEvent, Found, PeerLost, Received
from tandem.node.profiling.profiler import ProfileAsked


class AdapterSource(Protocol):
    """Where adapters come from; both may read from disk, and raise AdapterError."""

    def get(self, ref: AdapterRef) -> HostAdapter: ...

    def read(self, path: str) -> HostAdapter: ...


class Delivery:
    """Takes events on the I/O thread and posts them to the step loop: requests once their grammar is compiled and their
    adapter read, others at once. `hear` is told of each message as it comes, `tell` answers a router's TellStory."""

    def __init__(
        self,
        post: Callable[[object], None],
        grammars: Grammars,
        adapters: AdapterSource | None,
        hear: Callable[[Message], None],
        tell: Callable[[NodeKey, TellStory], None],
    ) -> None:
        self._post, self._grammars, self._adapters, self._hear, self._tell = post, grammars, adapters, hear, tell
        self._grammar_workshop, self._adapter_workshop = Workshop("tandem-grammars"), Workshop("tandem-adapters")

    def deliver(self, event: ControlEvent) -> None:
        message = event.message if isinstance(event, Received) else None
        if message is not None:
            self._hear(message)
        if isinstance(event, Received) and isinstance(event.message, StartProfile | StopProfile):
            self._post(ProfileAsked(event.sender, event.message))
            return
        if isinstance(event, Received) and isinstance(event.message, TellStory):
            self._tell(event.sender, event.message)
            return
        found = Found()
        find_adapter = self._finder(message, found)
        if find_adapter is not None and isinstance(event, Received):
            event = replace(event, adapter=found)
        grammar = message.sampling.grammar if isinstance(message, Submit) else ""
        prepare = partial(self._grammars.prepare, grammar) if grammar and grammar not in self._grammars else None
        if not (grammar or find_adapter or (isinstance(event, PeerLost) and event.info.role == "router")):
            self._post(event)
            return
        # The loss of a router comes behind what it asked for.
        behind_grammars = partial(self._grammar_workshop.prepare, prepare, partial(self._post, event))
        self._adapter_workshop.prepare(find_adapter, behind_grammars)

    def _finder(self, message: Message | None, found: Found) -> Callable[[], None] | None:
        """What finds the adapter that a message names; None: it names none, or none can be served here."""
        if self._adapters is None:
            return None
        if isinstance(message, LoadAdapter):
            return partial(found.look, partial(self._adapters.read, message.path))
        if isinstance(message, Submit) and message.adapter is not None:
            return partial(found.look, partial(self._adapters.get, message.adapter))
        return None

    def close(self) -> None:
        """Ends the threads when what they have begun is done."""
        self._adapter_workshop.stop()
        self._grammar_workshop.stop()
