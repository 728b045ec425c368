"""Adapters in the memory of all ranks: read on every rank before a step may ask for them, held as long as rank 0 has
them."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from socket import socket

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.adapters.store import AdapterStore
from tandem.engine.contracts.errors import AdapterError
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.process.process_log import RateLimited
from tandem.engine.process.workshop import Workshop
from tandem.node.ranks.channel import AdapterRead, Command, receive_answer, send

limited = RateLimited(logging.getLogger(__name__))


class AdapterLeader:
    """Rank 0's store, which answers once the other ranks hold what it found. For one thread. `tell` orders all of them,
    `ends` are their sockets, on which nothing but answers comes back."""

    def __init__(
        self, store: AdapterStore, tell: Callable[[Command], None], ends: Sequence[socket], within_s: float
    ) -> None:
        self._store, self._tell, self._ends, self._within_s = store, tell, ends, within_s
        self._shared: weakref.WeakSet[HostAdapter] = weakref.WeakSet()
        self._released: list[AdapterRef] = []

    def get(self, ref: AdapterRef) -> HostAdapter:
        return self._on_all(self._store.get(ref), ref.path)

    def read(self, path: str) -> HostAdapter:
        return self._on_all(self._store.read(path), path)

    def _on_all(self, adapter: HostAdapter, path: str) -> HostAdapter:
        """Returns the adapter once every other rank holds it. Raises AdapterError where a rank can't have it, or
        doesn't say so in time."""
        while self._released:
            self._tell(Command("let_go", adapter=self._released.pop()))
        if adapter not in self._shared:
            ref, deadline = AdapterRef(path, adapter.digest), time.monotonic() + self._within_s
            self._tell(Command("read", adapter=ref))
            weakref.finalize(adapter, self._released.append, ref)
            for rank, end in enumerate(self._ends, start=1):
                problem = _answer(end, ref.digest, deadline)
                if problem:
                    raise AdapterError(f"rank {rank}: {problem}")
            self._shared.add(adapter)
        return adapter


def _answer(end: socket, digest: bytes, deadline: float) -> str:
    """The rank's problem with that adapter, if any. Answers that came too late for their questions are passed over."""
    while True:
        answer = receive_answer(end, deadline - time.monotonic())
        if answer is None:
            return "it did not read the adapter in time"
        if answer.digest == digest:
            return answer.problem


class AdapterFollower:
    """The adapters of another rank: read on a thread of their own, since the rank may be in a step."""

    def __init__(self, store: AdapterStore, end: socket) -> None:
        self._store, self._end = store, end
        self._held: dict[bytes, HostAdapter] = {}
        self._workshop = Workshop("tandem-adapters")

    def hear(self, command: Command) -> None:
        assert command.adapter is not None
        work = self._read if command.verb == "read" else self._let_go
        self._workshop.prepare(partial(work, command.adapter), _nothing)

    def _read(self, ref: AdapterRef) -> None:
        problem = ""
        try:
            self._held[ref.digest] = self._store.get(ref)
        except AdapterError as error:
            problem = error.message
        except Exception as error:  # it costs those who want this adapter alone
            limited.exception("an adapter can't be read", key="adapter")
            problem = f"the adapter can't be read: {error!r}"
        send([self._end], AdapterRead(ref.digest, problem))

    def _let_go(self, ref: AdapterRef) -> None:
        self._held.pop(ref.digest, None)


def _nothing() -> None:
    pass
