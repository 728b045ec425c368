"""What a hand-off manager wants done, queued until the node's main drains it. Pure; shared by sources and sinks."""

from __future__ import annotations

from typing import Generic, TypeVar

from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol.jobs import TransferJob, TransportCommand
from tandem.kv_connector.protocol.peer_effects import PeerEffect

Outcome = TypeVar("Outcome")
Item = TypeVar("Item")


class ActionQueues(Generic[Outcome]):
    """Each `drain_…` gives what came since the last call, in order. Of one turn, effects on peers are carried out
    first, then commands to transports, then jobs; messages go last: a grant is open before its source hears of it."""

    def __init__(self) -> None:
        self._outbox: list[tuple[str, Message]] = []
        self._jobs: list[TransferJob] = []
        self._commands: list[TransportCommand] = []
        self._effects: list[PeerEffect] = []
        self._outcomes: list[Outcome] = []

    def drain_outbox(self) -> list[tuple[str, Message]]:
        """(peer_id, message)"""
        return _drained(self._outbox)

    def drain_jobs(self) -> list[TransferJob]:
        return _drained(self._jobs)

    def drain_transport_commands(self) -> list[TransportCommand]:
        return _drained(self._commands)

    def drain_peer_effects(self) -> list[PeerEffect]:
        return _drained(self._effects)

    def drain_events(self) -> list[Outcome]:
        """How hand-offs ended."""
        return _drained(self._outcomes)


def _drained(queue: list[Item]) -> list[Item]:
    items = queue[:]
    queue.clear()
    return items
