"""The sink's side of one hand-off: transition table and the machine that feeds it.

One machine per (request, attempt); see source_table.py for the conventions. The rule that everything here serves: a
granted block is given back only by commit (the source said KVReady: it writes no more), by KVDrained, or by a fence.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class SinkState(enum.Enum):
    """Where a hand-off stands at its sink."""

    UNKNOWN = "unknown"  # nothing heard
    EARLY = "early"  # KVClaim came before Submit
    EXPECTING = "expecting"  # ticket: Submit came, hits pinned, no claim yet
    QUEUED = "queued"  # claimed, waits for blocks in the order of claims
    GRANTED = "granted"  # writes may land
    VERIFYING = "verifying"  # KVReady accepted, digests are being checked
    RESENDING = "resending"  # digests differed; the source writes those blocks again
    COMMITTED = "committed"  # moved to the scheduler; tombstone
    QUARANTINED = "quarantined"  # over, but writes may still land in the granted blocks
    CLOSED = "closed"  # over, all given back; tombstone
    REJECTED = "rejected"  # over before its Submit came; tombstone


class SinkEvent(enum.Enum):
    """What can happen to a hand-off at its sink."""

    SUBMIT = "submit"
    CLAIM = "claim"
    CAN_GRANT = "can_grant"  # first in the queue and its blocks are allocated
    READY = "ready"  # KVReady of this grant, source epoch and round
    VERIFIED = "verified"  # digests match
    MISMATCH = "mismatch"  # digests differ, another try is allowed
    MISMATCH_FINAL = "mismatch_final"  # digests differ, no try left or no source left
    RELEASE = "release"
    DRAINED = "drained"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    LEASE = "lease"  # the grant's lease ran out
    SOURCE_LOST = "source_lost"
    FENCED = "fenced"  # no write of the source's epoch can land any more
    TIMER = "timer"


class SinkAction(enum.Enum):
    """What a transition asks of the sink's manager."""

    SEND_WAIT = "send_wait"
    SEND_GRANT = "send_grant"
    SEND_COMMITTED = "send_committed"
    SEND_RESEND = "send_resend"
    SEND_REFUSED = "send_refused"
    SEND_ACK = "send_ack"
    OPEN_GRANT = "open_grant"
    CLOSE_GRANT = "close_grant"
    VERIFY = "verify"
    UNPIN = "unpin"  # give the pinned hits back
    FREE = "free"  # give the granted blocks back
    COMMIT = "commit"  # hits and granted blocks move to the scheduler; an end
    RECOMPUTE = "recompute"  # this node computes the prompt itself, first tokens known; an end
    END_RELEASED = "end_released"  # the source has told the router how it ended
    END_CANCELLED = "end_cancelled"
    END_FAILED = "end_failed"


S, E, A = SinkState, SinkEvent, SinkAction
SinkRows = Mapping[tuple[SinkState, SinkEvent], tuple[SinkState, tuple[SinkAction, ...]]]

_ROWS: SinkRows = {
    (S.UNKNOWN, E.SUBMIT): (S.EXPECTING, ()),
    (S.UNKNOWN, E.CLAIM): (S.EARLY, (A.SEND_WAIT,)),
    (S.UNKNOWN, E.READY): (S.UNKNOWN, (A.SEND_REFUSED,)),
    (S.UNKNOWN, E.RELEASE): (S.REJECTED, ()),
    (S.UNKNOWN, E.DRAINED): (S.REJECTED, (A.SEND_ACK,)),
    #
    (S.EARLY, E.SUBMIT): (S.QUEUED, (A.SEND_WAIT,)),
    (S.EARLY, E.CLAIM): (S.EARLY, (A.SEND_WAIT,)),
    (S.EARLY, E.RELEASE): (S.REJECTED, ()),
    (S.EARLY, E.DRAINED): (S.REJECTED, (A.SEND_ACK,)),
    (S.EARLY, E.CANCEL): (S.REJECTED, (A.SEND_REFUSED,)),
    (S.EARLY, E.DEADLINE): (S.REJECTED, (A.SEND_REFUSED,)),
    (S.EARLY, E.SOURCE_LOST): (S.REJECTED, ()),
    (S.EARLY, E.FENCED): (S.REJECTED, ()),
    #
    (S.EXPECTING, E.CLAIM): (S.QUEUED, (A.SEND_WAIT,)),
    (S.EXPECTING, E.RELEASE): (S.CLOSED, (A.UNPIN, A.END_RELEASED)),
    (S.EXPECTING, E.DRAINED): (S.CLOSED, (A.UNPIN, A.SEND_ACK, A.END_RELEASED)),
    (S.EXPECTING, E.CANCEL): (S.CLOSED, (A.UNPIN, A.END_CANCELLED)),
    (S.EXPECTING, E.DEADLINE): (S.CLOSED, (A.UNPIN, A.END_FAILED)),
    (S.EXPECTING, E.SOURCE_LOST): (S.CLOSED, (A.UNPIN, A.END_FAILED)),
    (S.EXPECTING, E.FENCED): (S.CLOSED, (A.UNPIN, A.END_FAILED)),
    #
    (S.QUEUED, E.CLAIM): (S.QUEUED, (A.SEND_WAIT,)),
    (S.QUEUED, E.CAN_GRANT): (S.GRANTED, (A.OPEN_GRANT, A.SEND_GRANT)),
    (S.QUEUED, E.RELEASE): (S.CLOSED, (A.UNPIN, A.END_RELEASED)),
    (S.QUEUED, E.DRAINED): (S.CLOSED, (A.UNPIN, A.SEND_ACK, A.END_RELEASED)),
    (S.QUEUED, E.CANCEL): (S.CLOSED, (A.UNPIN, A.SEND_REFUSED, A.END_CANCELLED)),
    (S.QUEUED, E.DEADLINE): (S.CLOSED, (A.UNPIN, A.SEND_REFUSED, A.END_FAILED)),
    (S.QUEUED, E.SOURCE_LOST): (S.CLOSED, (A.UNPIN, A.END_FAILED)),
    (S.QUEUED, E.FENCED): (S.CLOSED, (A.UNPIN, A.END_FAILED)),
    #
    (S.GRANTED, E.CLAIM): (S.GRANTED, (A.SEND_GRANT,)),
    (S.GRANTED, E.READY): (S.VERIFYING, (A.VERIFY,)),
    (S.GRANTED, E.RELEASE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.END_RELEASED)),
    (S.GRANTED, E.DRAINED): (S.CLOSED, (A.CLOSE_GRANT, A.UNPIN, A.FREE, A.SEND_ACK, A.END_RELEASED)),
    (S.GRANTED, E.CANCEL): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_CANCELLED)),
    (S.GRANTED, E.DEADLINE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_FAILED)),
    (S.GRANTED, E.LEASE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_FAILED)),
    (S.GRANTED, E.SOURCE_LOST): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.END_FAILED)),
    (S.GRANTED, E.FENCED): (S.CLOSED, (A.CLOSE_GRANT, A.UNPIN, A.FREE, A.END_FAILED)),
    #
    (S.VERIFYING, E.VERIFIED): (S.COMMITTED, (A.CLOSE_GRANT, A.COMMIT, A.SEND_COMMITTED)),
    (S.VERIFYING, E.MISMATCH): (S.RESENDING, (A.SEND_RESEND,)),
    (S.VERIFYING, E.MISMATCH_FINAL): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.RECOMPUTE)),
    (S.VERIFYING, E.RELEASE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.END_RELEASED)),
    (S.VERIFYING, E.DRAINED): (S.CLOSED, (A.CLOSE_GRANT, A.UNPIN, A.FREE, A.SEND_ACK, A.END_RELEASED)),
    (S.VERIFYING, E.CANCEL): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_CANCELLED)),
    (S.VERIFYING, E.DEADLINE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_FAILED)),
    # All bytes are here: whether the source still lives no longer matters (the machine remembers it).
    (S.VERIFYING, E.SOURCE_LOST): (S.VERIFYING, ()),
    (S.VERIFYING, E.FENCED): (S.VERIFYING, ()),
    #
    (S.RESENDING, E.TIMER): (S.RESENDING, (A.SEND_RESEND,)),
    (S.RESENDING, E.READY): (S.VERIFYING, (A.VERIFY,)),
    (S.RESENDING, E.RELEASE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.END_RELEASED)),
    (S.RESENDING, E.DRAINED): (S.CLOSED, (A.CLOSE_GRANT, A.UNPIN, A.FREE, A.SEND_ACK, A.END_RELEASED)),
    (S.RESENDING, E.CANCEL): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_CANCELLED)),
    (S.RESENDING, E.DEADLINE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.END_FAILED)),
    # The first tokens are known since KVReady, so the rest can be made here without the source.
    (S.RESENDING, E.LEASE): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.SEND_REFUSED, A.RECOMPUTE)),
    (S.RESENDING, E.SOURCE_LOST): (S.QUARANTINED, (A.CLOSE_GRANT, A.UNPIN, A.RECOMPUTE)),
    (S.RESENDING, E.FENCED): (S.CLOSED, (A.CLOSE_GRANT, A.UNPIN, A.FREE, A.RECOMPUTE)),
    #
    (S.COMMITTED, E.READY): (S.COMMITTED, (A.SEND_COMMITTED,)),
    (S.COMMITTED, E.DRAINED): (S.COMMITTED, (A.SEND_ACK,)),
    #
    (S.QUARANTINED, E.TIMER): (S.QUARANTINED, (A.SEND_REFUSED,)),
    (S.QUARANTINED, E.CLAIM): (S.QUARANTINED, (A.SEND_REFUSED,)),
    (S.QUARANTINED, E.READY): (S.QUARANTINED, (A.SEND_REFUSED,)),
    (S.QUARANTINED, E.DRAINED): (S.CLOSED, (A.FREE, A.SEND_ACK)),
    (S.QUARANTINED, E.FENCED): (S.CLOSED, (A.FREE,)),
    #
    (S.CLOSED, E.CLAIM): (S.CLOSED, (A.SEND_REFUSED,)),
    (S.CLOSED, E.READY): (S.CLOSED, (A.SEND_REFUSED,)),
    (S.CLOSED, E.DRAINED): (S.CLOSED, (A.SEND_ACK,)),
    #
    (S.REJECTED, E.SUBMIT): (S.CLOSED, (A.END_FAILED,)),
    (S.REJECTED, E.CLAIM): (S.REJECTED, (A.SEND_REFUSED,)),
    (S.REJECTED, E.READY): (S.REJECTED, (A.SEND_REFUSED,)),
    (S.REJECTED, E.DRAINED): (S.REJECTED, (A.SEND_ACK,)),
}

_VERDICTS = {E.VERIFIED, E.MISMATCH, E.MISMATCH_FINAL}
_IGNORED: Mapping[SinkState, frozenset[SinkEvent]] = {
    S.UNKNOWN: frozenset({*_VERDICTS, E.CAN_GRANT, E.CANCEL, E.DEADLINE, E.LEASE, E.SOURCE_LOST, E.FENCED, E.TIMER}),
    S.EARLY: frozenset({*_VERDICTS, E.CAN_GRANT, E.READY, E.LEASE, E.TIMER}),
    S.EXPECTING: frozenset({*_VERDICTS, E.SUBMIT, E.CAN_GRANT, E.READY, E.LEASE, E.TIMER}),
    S.QUEUED: frozenset({*_VERDICTS, E.SUBMIT, E.READY, E.LEASE, E.TIMER}),
    S.GRANTED: frozenset({*_VERDICTS, E.SUBMIT, E.CAN_GRANT, E.TIMER}),
    S.VERIFYING: frozenset({E.SUBMIT, E.CLAIM, E.CAN_GRANT, E.READY, E.LEASE, E.TIMER}),
    S.RESENDING: frozenset({*_VERDICTS, E.SUBMIT, E.CLAIM, E.CAN_GRANT}),
    S.COMMITTED: frozenset(E) - {E.READY, E.DRAINED},
    S.QUARANTINED: frozenset(E) - {E.TIMER, E.CLAIM, E.READY, E.DRAINED, E.FENCED},
    S.CLOSED: frozenset(E) - {E.CLAIM, E.READY, E.DRAINED},
    S.REJECTED: frozenset(E) - {E.SUBMIT, E.CLAIM, E.READY, E.DRAINED},
}


def transition(
    state: SinkState, event: SinkEvent, rows: SinkRows = _ROWS
) -> tuple[SinkState, tuple[SinkAction, ...]] | None:
    """The next state and the actions for `event` in `state`; None if the event is to be dropped and counted."""
    row = rows.get((state, event))
    if row is None:
        assert event in _IGNORED[state], f"no rule for {event} in {state}"
    return row


class SinkMachine:
    """State of one hand-off on its sink, with the numbers that tell a fresh message from a stale one.

    `source_epoch` is the epoch that the ticket (or, before it, the claim) names; nothing of another epoch counts.
    """

    __slots__ = (
        "fenced", "grant_id", "max_resends", "num_dropped", "round", "rows", "sink_epoch", "source_epoch",
        "source_lost", "state",
    )  # fmt: skip

    def __init__(self, sink_epoch: int, max_resends: int = 2, rows: SinkRows = _ROWS) -> None:
        self.state = SinkState.UNKNOWN
        self.sink_epoch = sink_epoch
        self.source_epoch = 0  # 0: not known yet
        self.grant_id = 0  # 0: none given
        self.round = 0  # of the KVReady that is awaited or being verified
        self.max_resends = max_resends
        self.source_lost = False
        self.fenced = False
        self.num_dropped = 0
        self.rows = rows

    def on(self, event: SinkEvent) -> tuple[SinkAction, ...]:
        """Takes an event that carries no data: CANCEL, DEADLINE, LEASE, TIMER."""
        row = transition(self.state, event, self.rows)
        if row is None:
            self.num_dropped += 1
            return ()
        self.state, actions = row
        if self.state is SinkState.QUARANTINED and self.fenced and event is not SinkEvent.FENCED:
            actions += self.on(SinkEvent.FENCED)  # fenced while the digests were checked
        return actions

    def on_submit(self, source_epoch: int) -> tuple[SinkAction, ...]:
        if self.state is SinkState.EARLY and self.source_epoch != source_epoch:
            self.state = SinkState.UNKNOWN  # the claim came from another life of the source
            self.num_dropped += 1
        if self.state in (SinkState.UNKNOWN, SinkState.EARLY):
            self.source_epoch = source_epoch
        return self.on(SinkEvent.SUBMIT)

    def on_claim(self, source_epoch: int, sink_epoch: int) -> tuple[SinkAction, ...]:
        if not self._is_from(source_epoch) or sink_epoch != self.sink_epoch:
            return self._drop()
        return self.on(SinkEvent.CLAIM)

    def on_can_grant(self, grant_id: int) -> tuple[SinkAction, ...]:
        assert self.state is SinkState.QUEUED
        assert self.grant_id == 0, "one grant an attempt"
        self.grant_id = grant_id
        return self.on(SinkEvent.CAN_GRANT)

    def on_ready(self, grant_id: int, source_epoch: int, sink_epoch: int, round: int) -> tuple[SinkAction, ...]:
        """Takes a KVReady, whose grant signature the caller has found to be the one given out. One of an older round is
        a late duplicate and is dropped: the blocks may be being written again."""
        if not self._is_from(source_epoch) or sink_epoch != self.sink_epoch:
            return self._drop()
        if self.grant_id and (grant_id != self.grant_id or round != self.round):
            return self._drop()
        return self.on(SinkEvent.READY)

    def on_verified(self, grant_id: int, round: int, matches: bool) -> tuple[SinkAction, ...]:
        if grant_id != self.grant_id or round != self.round or self.state is not SinkState.VERIFYING:
            return self._drop()
        if matches:
            return self.on(SinkEvent.VERIFIED)
        if round == self.max_resends or self.source_lost:
            return self.on(SinkEvent.MISMATCH_FINAL)
        self.round = round + 1
        return self.on(SinkEvent.MISMATCH)

    def on_release(self, source_epoch: int) -> tuple[SinkAction, ...]:
        return self.on(SinkEvent.RELEASE) if self._is_from(source_epoch) else self._drop()

    def on_drained(self, source_epoch: int, grant_id: int) -> tuple[SinkAction, ...]:
        """Takes a KVDrained. Its `grant_id` is 0 when the source never held a grant and, this attempt being over there,
        never will."""
        if not self._is_from(source_epoch) or grant_id not in (0, self.grant_id):
            return self._drop()
        return self.on(SinkEvent.DRAINED)

    def on_source_lost(self, source_epoch: int) -> tuple[SinkAction, ...]:
        if source_epoch != self.source_epoch:
            return self._drop()
        self.source_lost = True
        return self.on(SinkEvent.SOURCE_LOST)

    def on_fenced(self, source_epoch: int) -> tuple[SinkAction, ...]:
        if source_epoch != self.source_epoch:
            return self._drop()
        self.source_lost = self.fenced = True
        return self.on(SinkEvent.FENCED)

    def _is_from(self, source_epoch: int) -> bool:
        if self.source_epoch == 0:
            self.source_epoch = source_epoch
        return source_epoch == self.source_epoch

    def _drop(self) -> tuple[SinkAction, ...]:
        self.num_dropped += 1
        return ()
