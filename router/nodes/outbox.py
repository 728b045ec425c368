"""Verbs that were sent and not yet answered: sent again until they are, or until their deadline. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    Pooled,
    RequestFailed,
    Submit,
    TokenDelta,
)

VerbKey = tuple[str, AttemptKey, tuple[int, ...]]  # (verb, attempt, sample_indices)


@dataclass(slots=True)
class _Pending:
    payload: bytes
    next_send: float
    give_up: float


@dataclass(slots=True)
class Outbox:
    """What one node has yet to answer, each with the time of its next sending and of giving up, in seconds."""

    resend_s: float
    give_up_s: float
    _pending: dict[VerbKey, _Pending] = field(default_factory=dict)
    num_resent: int = 0

    def __len__(self) -> int:
        return len(self._pending)

    def sent(self, message: Submit | Cancel, payload: bytes, now: float) -> None:
        """Remembers a verb that was sent. A Cancel takes its request's Submit out, since a resend could otherwise
        submit it again. Other verbs are not sent again: whoever asked waits for the outcome, and asks anew."""
        if isinstance(message, Cancel):
            key: VerbKey = ("cancel", message.key, message.sample_indices)
            if not message.sample_indices:
                self._pending.pop(("submit", message.key, ()), None)
        else:
            key = ("submit", message.key, ())
        self._pending[key] = _Pending(payload, now + self.resend_s, now + self.give_up_s)

    def answered(self, message: Accepted | Cancelled | Pooled | RequestFailed | TokenDelta) -> None:
        if not self._pending:
            return
        if isinstance(message, Cancelled):
            self._pending.pop(("cancel", message.key, message.sample_indices), None)
        else:
            self._pending.pop(("submit", message.key, ()), None)

    def due(self, now: float) -> list[bytes]:
        """What to send again now."""
        payloads = []
        for key, entry in list(self._pending.items()):
            if now >= entry.give_up:
                del self._pending[key]
            elif now >= entry.next_send:
                entry.next_send = now + self.resend_s
                payloads.append(entry.payload)
        self.num_resent += len(payloads)
        return payloads

    def clear(self) -> None:
        self._pending.clear()
