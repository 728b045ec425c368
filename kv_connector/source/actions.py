"""Carries out the actions of a source's machines as messages to sinks, jobs, freed blocks and outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVRelease
from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import Send, SourceEffect
from tandem.kv_connector.protocol.jobs import Retire
from tandem.kv_connector.protocol.outcomes import HandoffCompleted, HandoffFailed
from tandem.kv_connector.protocol.source_table import SourceAction as A
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.record import SourceRecord

MAX_RESEND_S = 5.0  # a guess


class SourceActions:
    """Runs actions on records of `ledger`; what is to be done elsewhere is appended to `effects`."""

    def __init__(self, ledger: SourceLedger, effects: list[SourceEffect], options: NodeOptions) -> None:
        self._ledger, self._effects = ledger, effects
        self._digests, self._resend_s = options.digests, options.timeouts.resend_s

    def wait_longer(self, record: SourceRecord) -> None:
        record.resend_every_s = min(2 * record.resend_every_s, MAX_RESEND_S)
        record.resend_at = self._ledger.now + record.resend_every_s

    def await_answer(self, record: SourceRecord) -> None:
        """Begins the wait for an answer to a message that was just sent for the first time, though not by `_send`."""
        record.resend_every_s = self._resend_s
        record.resend_at = self._ledger.now + record.resend_every_s

    def _send(self, record: SourceRecord, message: Message) -> None:
        if record.resend_at <= self._ledger.now:
            record.resend_every_s = max(record.resend_every_s, self._resend_s)
            record.resend_at = self._ledger.now + record.resend_every_s
        self._effects.append(Send(record.peer.key, message))

    def run(self, record: SourceRecord, actions: Sequence[A]) -> None:
        for action in actions:
            self._act(record, action)
        self._ledger.book(record)
        self._ledger.counters.events_dropped += record.machine.num_dropped - record.num_drops_counted
        record.num_drops_counted = record.machine.num_dropped
        if record.machine.state is S.CLOSED and not record.closed_at:
            record.closed_at = self._ledger.now

    def _act(self, record: SourceRecord, action: A) -> None:
        request_id, attempt = record.key
        if action is A.SEND_CLAIM:
            claim = KVClaim(
                request_id=request_id,
                attempt=attempt,
                source_id=self._ledger.info.node_id,
                source_epoch=self._ledger.info.epoch,
                sink_epoch=record.peer.epoch,
                num_prompt_tokens=record.num_prompt_tokens,
                first_kept=record.first_kept,
            )
            self._send(record, claim)
        elif action is A.SEND_READY:
            if record.ready is not None:
                self._send(record, record.ready)
        elif action is A.SEND_RELEASE:
            reason, epoch = record.reason, self._ledger.info.epoch
            self._send(record, KVRelease(request_id=request_id, attempt=attempt, source_epoch=epoch, reason=reason))
        elif action is A.SEND_DRAINED:
            grant_id, epoch = record.machine.grant_id, self._ledger.info.epoch
            self._send(record, KVDrained(request_id=request_id, attempt=attempt, source_epoch=epoch, grant_id=grant_id))
        elif action in (A.PUSH_COMPUTED, A.PUSH_AGAIN, A.FINALIZE, A.RETIRE):
            self._queue_job(record, action)
        elif action is A.FREE:
            self._ledger.free(record)
        else:
            self._end(record, action)

    def _queue_job(self, record: SourceRecord, action: A) -> None:
        if action is A.PUSH_COMPUTED:
            push = record.take_whole_push(record.num_computed_tokens, record.last_step)
            self._effects += [push] if push is not None else []
        elif action is A.PUSH_AGAIN:
            self._effects.append(record.push_again())
        elif action is A.FINALIZE:
            self._effects.append(record.finalize(record.machine.round, self._digests))
        else:
            assert record.grant is not None
            record.retire_asked_at = self._ledger.now
            self._effects.append(Retire(record.key, record.grant))

    def _end(self, record: SourceRecord, action: A) -> None:
        if action in (A.END_COMMITTED, A.END_RELEASED):
            self._ledger.counters.handoffs_completed += 1
            reason = "" if action is A.END_COMMITTED else outcomes.FINISHED
            self._effects.append(HandoffCompleted(record.key, reason))
        elif action is A.END_REFUSED and record.reason == outcomes.RECOMPUTING:
            self._effects.append(HandoffCompleted(record.key, outcomes.RECOMPUTING))
        elif action in (A.END_REFUSED, A.END_FAILED):
            self._ledger.counters.handoffs_failed += 1
            self._effects.append(HandoffFailed(record.key, record.reason, outcomes.is_retryable(record.reason)))
