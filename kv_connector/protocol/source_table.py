"""The source's side of one hand-off: transition table and the machine that feeds it.

One machine per (request, attempt). The table is total: every (state, event) pair is either in `_ROWS` or listed in
`_IGNORED` (dropped and counted). The machine turns raw happenings into events (is this grant mine? is this round
stale?) and holds the few numbers that this takes; what an action means in blocks and messages is the manager's part.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class SourceState(enum.Enum):
    """Where a hand-off stands at its source."""

    IDLE = "idle"  # submitted, waits in the scheduler's queue, nothing said to the sink
    CLAIMING = "claiming"  # KVClaim sent, prompt not started
    PARKED = "parked"  # computing without a grant
    PARKED_DONE = "parked_done"  # computed, still without a grant
    PUSHING = "pushing"  # grant held; layers are pushed as they are computed
    FINALIZING = "finalizing"  # computed; the transfer thread flushes, digests and sends KVReady
    READY = "ready"  # KVReady sent, resent until answered
    DRAINING = "draining"  # gave up or was refused; transfer jobs are being retired
    DRAINED = "drained"  # no write can land any more; KVDrained is resent until answered
    RETIRING = "retiring"  # the sink needs no word any more; transfer jobs are being retired
    CLOSED = "closed"


class SourceEvent(enum.Enum):
    """What can happen to a hand-off at its source."""

    CLAIM = "claim"  # the scheduler is about to schedule the first chunk
    START = "start"  # first chunk scheduled
    COMPUTED = "computed"  # first tokens known, at least one sample goes on
    ALL_FINISHED = "all_finished"  # first tokens known, every sample ended with it
    GRANT = "grant"  # a valid KVGrant
    WAIT = "wait"
    SENT = "sent"  # the transfer thread has flushed everything and sent KVReady of this round
    PUSH_FAILED = "push_failed"
    RETIRED = "retired"
    COMMITTED = "committed"
    RESEND = "resend"  # KVResend of the next round
    REFUSED = "refused"
    DRAINED_ACK = "drained_ack"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    SINK_LOST = "sink_lost"
    TIMER = "timer"


class SourceAction(enum.Enum):
    """What a transition asks of the source's manager."""

    SEND_CLAIM = "send_claim"
    SEND_READY = "send_ready"
    SEND_RELEASE = "send_release"
    SEND_DRAINED = "send_drained"
    PUSH_COMPUTED = "push_computed"  # what was computed before the grant came
    PUSH_AGAIN = "push_again"  # the blocks that a KVResend names
    FINALIZE = "finalize"
    RETIRE = "retire"
    FREE = "free"  # no job reads the source blocks any more
    END_COMMITTED = "end_committed"
    END_RELEASED = "end_released"  # nothing to hand off: every sample ended with its first token
    END_CANCELLED = "end_cancelled"
    END_REFUSED = "end_refused"
    END_FAILED = "end_failed"


S, E, A = SourceState, SourceEvent, SourceAction
SourceRows = Mapping[tuple[SourceState, SourceEvent], tuple[SourceState, tuple[SourceAction, ...]]]

# Without a grant there is no job to retire: the hand-off is drained at once.
_LEAVE = (A.SEND_RELEASE, A.SEND_DRAINED, A.FREE)

_ROWS: SourceRows = {
    (S.IDLE, E.CLAIM): (S.CLAIMING, (A.SEND_CLAIM,)),
    (S.IDLE, E.CANCEL): (S.DRAINED, (*_LEAVE, A.END_CANCELLED)),
    (S.IDLE, E.DEADLINE): (S.DRAINED, (*_LEAVE, A.END_FAILED)),
    (S.IDLE, E.REFUSED): (S.DRAINED, (A.SEND_DRAINED, A.FREE, A.END_REFUSED)),
    (S.IDLE, E.SINK_LOST): (S.CLOSED, (A.FREE, A.END_FAILED)),
    #
    (S.CLAIMING, E.TIMER): (S.CLAIMING, (A.SEND_CLAIM,)),
    (S.CLAIMING, E.WAIT): (S.CLAIMING, ()),
    (S.CLAIMING, E.START): (S.PARKED, ()),
    (S.CLAIMING, E.GRANT): (S.PUSHING, ()),
    (S.CLAIMING, E.CANCEL): (S.DRAINED, (*_LEAVE, A.END_CANCELLED)),
    (S.CLAIMING, E.DEADLINE): (S.DRAINED, (*_LEAVE, A.END_FAILED)),
    (S.CLAIMING, E.REFUSED): (S.DRAINED, (A.SEND_DRAINED, A.FREE, A.END_REFUSED)),
    (S.CLAIMING, E.SINK_LOST): (S.CLOSED, (A.FREE, A.END_FAILED)),
    #
    (S.PARKED, E.TIMER): (S.PARKED, (A.SEND_CLAIM,)),
    (S.PARKED, E.WAIT): (S.PARKED, ()),
    (S.PARKED, E.START): (S.PARKED, ()),  # preempted and restarted
    (S.PARKED, E.COMPUTED): (S.PARKED_DONE, ()),
    (S.PARKED, E.ALL_FINISHED): (S.DRAINED, (*_LEAVE, A.END_RELEASED)),
    (S.PARKED, E.GRANT): (S.PUSHING, (A.PUSH_COMPUTED,)),
    (S.PARKED, E.CANCEL): (S.DRAINED, (*_LEAVE, A.END_CANCELLED)),
    (S.PARKED, E.DEADLINE): (S.DRAINED, (*_LEAVE, A.END_FAILED)),
    (S.PARKED, E.REFUSED): (S.DRAINED, (A.SEND_DRAINED, A.FREE, A.END_REFUSED)),
    (S.PARKED, E.SINK_LOST): (S.CLOSED, (A.FREE, A.END_FAILED)),
    #
    (S.PARKED_DONE, E.TIMER): (S.PARKED_DONE, (A.SEND_CLAIM,)),
    (S.PARKED_DONE, E.WAIT): (S.PARKED_DONE, ()),
    (S.PARKED_DONE, E.GRANT): (S.FINALIZING, (A.PUSH_COMPUTED, A.FINALIZE)),
    (S.PARKED_DONE, E.CANCEL): (S.DRAINED, (*_LEAVE, A.END_CANCELLED)),
    (S.PARKED_DONE, E.DEADLINE): (S.DRAINED, (*_LEAVE, A.END_FAILED)),
    (S.PARKED_DONE, E.REFUSED): (S.DRAINED, (A.SEND_DRAINED, A.FREE, A.END_REFUSED)),
    (S.PARKED_DONE, E.SINK_LOST): (S.CLOSED, (A.FREE, A.END_FAILED)),
    #
    (S.PUSHING, E.START): (S.PUSHING, ()),
    (S.PUSHING, E.COMPUTED): (S.FINALIZING, (A.PUSH_COMPUTED, A.FINALIZE)),
    (S.PUSHING, E.ALL_FINISHED): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_RELEASED)),
    (S.PUSHING, E.PUSH_FAILED): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_FAILED)),
    (S.PUSHING, E.CANCEL): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_CANCELLED)),
    (S.PUSHING, E.DEADLINE): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_FAILED)),
    (S.PUSHING, E.REFUSED): (S.DRAINING, (A.RETIRE, A.END_REFUSED)),
    (S.PUSHING, E.SINK_LOST): (S.RETIRING, (A.RETIRE, A.END_FAILED)),
    #
    (S.FINALIZING, E.SENT): (S.READY, ()),
    (S.FINALIZING, E.PUSH_FAILED): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_FAILED)),
    # The sink's answer may overtake the transfer thread's word that KVReady was sent.
    (S.FINALIZING, E.COMMITTED): (S.RETIRING, (A.RETIRE, A.END_COMMITTED)),
    (S.FINALIZING, E.RESEND): (S.FINALIZING, (A.PUSH_AGAIN, A.FINALIZE)),
    (S.FINALIZING, E.CANCEL): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_CANCELLED)),
    (S.FINALIZING, E.DEADLINE): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_FAILED)),
    (S.FINALIZING, E.REFUSED): (S.DRAINING, (A.RETIRE, A.END_REFUSED)),
    (S.FINALIZING, E.SINK_LOST): (S.RETIRING, (A.RETIRE, A.END_FAILED)),
    #
    (S.READY, E.TIMER): (S.READY, (A.SEND_READY,)),
    (S.READY, E.COMMITTED): (S.RETIRING, (A.RETIRE, A.END_COMMITTED)),
    (S.READY, E.RESEND): (S.FINALIZING, (A.PUSH_AGAIN, A.FINALIZE)),
    (S.READY, E.CANCEL): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_CANCELLED)),
    (S.READY, E.DEADLINE): (S.DRAINING, (A.RETIRE, A.SEND_RELEASE, A.END_FAILED)),
    (S.READY, E.REFUSED): (S.DRAINING, (A.RETIRE, A.END_REFUSED)),
    (S.READY, E.SINK_LOST): (S.RETIRING, (A.RETIRE, A.END_FAILED)),
    #
    (S.DRAINING, E.TIMER): (S.DRAINING, (A.SEND_RELEASE,)),
    (S.DRAINING, E.RETIRED): (S.DRAINED, (A.FREE, A.SEND_DRAINED)),
    (S.DRAINING, E.COMMITTED): (S.RETIRING, ()),  # the sink was faster than our release
    (S.DRAINING, E.SINK_LOST): (S.RETIRING, ()),
    #
    (S.DRAINED, E.TIMER): (S.DRAINED, (A.SEND_DRAINED,)),
    (S.DRAINED, E.REFUSED): (S.DRAINED, (A.SEND_DRAINED,)),
    (S.DRAINED, E.DRAINED_ACK): (S.CLOSED, ()),
    (S.DRAINED, E.DEADLINE): (S.CLOSED, ()),  # a sink that still waits asks with KVRefused and is answered below
    (S.DRAINED, E.SINK_LOST): (S.CLOSED, ()),
    #
    (S.RETIRING, E.RETIRED): (S.CLOSED, (A.FREE,)),
    # A sink that we took for lost and that lives still wants to know when its blocks are safe.
    (S.CLOSED, E.REFUSED): (S.CLOSED, (A.SEND_DRAINED,)),
}

_NEVER_BEFORE_GRANT = {E.SENT, E.PUSH_FAILED, E.RETIRED, E.COMMITTED, E.RESEND, E.DRAINED_ACK}
_IGNORED: Mapping[SourceState, frozenset[SourceEvent]] = {
    S.IDLE: frozenset({*_NEVER_BEFORE_GRANT, E.START, E.COMPUTED, E.ALL_FINISHED, E.GRANT, E.WAIT, E.TIMER}),
    S.CLAIMING: frozenset({*_NEVER_BEFORE_GRANT, E.CLAIM, E.COMPUTED, E.ALL_FINISHED}),
    S.PARKED: frozenset({*_NEVER_BEFORE_GRANT, E.CLAIM}),
    S.PARKED_DONE: frozenset({*_NEVER_BEFORE_GRANT, E.CLAIM, E.START, E.COMPUTED, E.ALL_FINISHED}),
    S.PUSHING: frozenset({E.CLAIM, E.GRANT, E.WAIT, E.SENT, E.RETIRED, E.COMMITTED, E.RESEND, E.DRAINED_ACK, E.TIMER}),
    S.FINALIZING: frozenset(
        {E.CLAIM, E.START, E.COMPUTED, E.ALL_FINISHED, E.GRANT, E.WAIT, E.RETIRED, E.DRAINED_ACK, E.TIMER}
    ),
    S.READY: frozenset(
        {E.CLAIM, E.START, E.COMPUTED, E.ALL_FINISHED, E.GRANT, E.WAIT, E.SENT, E.PUSH_FAILED, E.RETIRED}
        | {E.DRAINED_ACK}
    ),
    S.DRAINING: frozenset(E) - {E.TIMER, E.RETIRED, E.COMMITTED, E.SINK_LOST},
    S.DRAINED: frozenset(E) - {E.TIMER, E.REFUSED, E.DRAINED_ACK, E.DEADLINE, E.SINK_LOST},
    S.RETIRING: frozenset(E) - {E.RETIRED},
    S.CLOSED: frozenset(E) - {E.REFUSED},
}


def transition(
    state: SourceState, event: SourceEvent, rows: SourceRows = _ROWS
) -> tuple[SourceState, tuple[SourceAction, ...]] | None:
    """The next state and the actions for `event` in `state`; None if the event is to be dropped and counted."""
    row = rows.get((state, event))
    if row is None:
        assert event in _IGNORED[state], f"no rule for {event} in {state}"
    return row


class SourceMachine:
    """State of one hand-off on its source, with the numbers that tell a fresh message from a stale one."""

    __slots__ = ("grant_id", "num_dropped", "round", "rows", "sink_epoch", "source_epoch", "state")

    def __init__(self, source_epoch: int, sink_epoch: int, rows: SourceRows = _ROWS) -> None:
        self.state = SourceState.IDLE
        self.source_epoch = source_epoch
        self.sink_epoch = sink_epoch
        self.grant_id = 0  # 0: never held one
        self.round = 0  # of the KVReady that is being made or was sent
        self.num_dropped = 0
        self.rows = rows

    def on(self, event: SourceEvent) -> tuple[SourceAction, ...]:
        """Takes an event that carries no data: local ones, timers, WAIT, REFUSED, DRAINED_ACK."""
        row = transition(self.state, event, self.rows)
        if row is None:
            self.num_dropped += 1
            return ()
        self.state, actions = row
        return actions

    def on_grant(self, grant_id: int, source_epoch: int, sink_epoch: int) -> tuple[SourceAction, ...]:
        """Takes a grant, which the caller has found genuine and for this request and attempt."""
        if (source_epoch, sink_epoch) != (self.source_epoch, self.sink_epoch) or self.grant_id != 0:
            return self._drop()
        if (self.state, SourceEvent.GRANT) in self.rows:
            self.grant_id = grant_id
        return self.on(SourceEvent.GRANT)

    def on_sent(self, grant_id: int, round: int) -> tuple[SourceAction, ...]:
        if grant_id != self.grant_id or round != self.round:
            return self._drop()
        return self.on(SourceEvent.SENT)

    def on_push_failed(self, grant_id: int) -> tuple[SourceAction, ...]:
        return self.on(SourceEvent.PUSH_FAILED) if grant_id == self.grant_id else self._drop()

    def on_retired(self, grant_id: int) -> tuple[SourceAction, ...]:
        return self.on(SourceEvent.RETIRED) if grant_id == self.grant_id else self._drop()

    def on_committed(self, grant_id: int) -> tuple[SourceAction, ...]:
        return self.on(SourceEvent.COMMITTED) if grant_id == self.grant_id else self._drop()

    def on_resend(self, grant_id: int, round: int) -> tuple[SourceAction, ...]:
        """Takes a KVResend. Only the next round is news; an older one was answered already, and the READY state resends
        that answer by itself."""
        if grant_id != self.grant_id or round != self.round + 1:
            return self._drop()
        if (self.state, SourceEvent.RESEND) in self.rows:
            self.round = round
        return self.on(SourceEvent.RESEND)

    def on_sink_lost(self, sink_epoch: int) -> tuple[SourceAction, ...]:
        return self.on(SourceEvent.SINK_LOST) if sink_epoch == self.sink_epoch else self._drop()

    def _drop(self) -> tuple[SourceAction, ...]:
        self.num_dropped += 1
        return ()
