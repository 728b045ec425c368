"""What the actions of a source's machines mean: messages to sinks, jobs, freed blocks, outcomes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo, peer_id_of
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.action_queues import ActionQueues
from tandem.kv_connector.protocol.jobs import Retire
from tandem.kv_connector.protocol.outcomes import HandoffCompleted, HandoffFailed, SourceOutcome
from tandem.kv_connector.protocol.source_table import SourceAction as A
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.record import NO_STEP, SourceRecord

logger = logging.getLogger(__name__)
MAX_RESEND_S = 5.0


@dataclass
class SourceCounters:
    handoffs_completed: int = 0
    handoffs_failed: int = 0
    grants_refused: int = 0
    messages_dropped: int = 0  # of no live hand-off, or of a kind that sources don't hear
    events_dropped: int = 0  # stale or of no live hand-off, whoever they came from
    verbs_resent: int = 0
    retires_overdue: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f"source_{name}": float(value) for name, value in vars(self).items()}


class SourceActionRunner(ActionQueues[SourceOutcome]):
    """Runs actions on records. `_now` (monotonic seconds) is set by whoever brings an event."""

    def __init__(self, info: NodeInfo, pool: BlockPool, options: NodeOptions) -> None:
        super().__init__()
        self.info = info
        self.counters = SourceCounters()
        self._pool = pool
        self._options = options
        self._now = 0.0

    def _wait_longer(self, record: SourceRecord) -> None:
        record.resend_every_s = min(2 * record.resend_every_s, MAX_RESEND_S)
        record.resend_at = self._now + record.resend_every_s

    def _await_answer(self, record: SourceRecord) -> None:
        """To what was just sent for the first time, though not by `_send`."""
        record.resend_every_s = self._options.timeouts.resend_s
        record.resend_at = self._now + record.resend_every_s

    def _warn_of_slow_retire(self, record: SourceRecord) -> None:
        """The transfer thread answers every Retire: no wait of its own is without a deadline. If it hangs all the same,
        nothing but the end of this process makes the blocks safe to reuse."""
        waited = self._now - record.retire_asked_at
        if waited < self._options.timeouts.quarantine_warn_s or record.was_warned:
            return
        record.was_warned = True
        self.counters.retires_overdue += 1
        logger.warning(
            "request %s attempt %d: the transfer to %s did not come to rest in %.0f s; %d blocks stay held until then",
            *record.key,
            record.peer.node_id,
            waited,
            len(record.block_ids),
        )

    def _send(self, record: SourceRecord, message: Message) -> None:
        if record.resend_at <= self._now:
            record.resend_every_s = max(record.resend_every_s, self._options.timeouts.resend_s)
            record.resend_at = self._now + record.resend_every_s
        self._outbox.append((peer_id_of(record.peer.node_id, record.peer.epoch), message))

    def _run(self, record: SourceRecord, actions: Sequence[A]) -> None:
        for action in actions:
            self._act(record, action)
        self.counters.events_dropped += record.machine.num_dropped - record.num_drops_counted
        record.num_drops_counted = record.machine.num_dropped
        if record.machine.state is S.CLOSED and not record.closed_at:
            record.closed_at = self._now

    def _act(self, record: SourceRecord, action: A) -> None:
        request_id, attempt = record.key
        if action is A.SEND_CLAIM:
            claim = KVClaim(
                request_id=request_id,
                attempt=attempt,
                source_id=self.info.node_id,
                source_epoch=self.info.epoch,
                sink_epoch=record.peer.epoch,
                num_prompt_tokens=record.num_prompt_tokens,
            )
            self._send(record, claim)
        elif action is A.SEND_READY:
            if record.ready is not None:
                self._send(record, record.ready)
        elif action is A.SEND_RELEASE:
            reason, epoch = record.reason, self.info.epoch
            self._send(record, KVRelease(request_id=request_id, attempt=attempt, source_epoch=epoch, reason=reason))
        elif action is A.SEND_DRAINED:
            grant_id, epoch = record.machine.grant_id, self.info.epoch
            self._send(record, KVDrained(request_id=request_id, attempt=attempt, source_epoch=epoch, grant_id=grant_id))
        elif action in (A.PUSH_COMPUTED, A.PUSH_AGAIN, A.FINALIZE, A.RETIRE):
            self._queue_job(record, action)
        elif action is A.FREE:
            self._free(record)
        else:
            self._end(record, action)

    def _queue_job(self, record: SourceRecord, action: A) -> None:
        if action is A.PUSH_COMPUTED:
            push = record.take_whole_push(record.num_computed_tokens, record.last_step)
            self._jobs += [push] if push is not None else []
        elif action is A.PUSH_AGAIN:
            self._jobs.append(record.push_again())
        elif action is A.FINALIZE:
            self._jobs.append(record.finalize(record.machine.round, self._options.digests))
        else:
            assert record.grant is not None
            record.retire_asked_at = self._now
            self._jobs.append(Retire(record.key, record.grant))

    def _free(self, record: SourceRecord) -> None:
        if record.owns_blocks:
            self._pool.free(record.block_ids, record.last_step if record.last_step != NO_STEP else None)
            record.block_ids, record.owns_blocks = [], False

    def _end(self, record: SourceRecord, action: A) -> None:
        if action in (A.END_COMMITTED, A.END_RELEASED):
            self.counters.handoffs_completed += 1
            reason = "" if action is A.END_COMMITTED else outcomes.FINISHED
            self._outcomes.append(HandoffCompleted(record.key, reason))
        elif action is A.END_REFUSED and record.reason == outcomes.RECOMPUTING:
            self._outcomes.append(HandoffCompleted(record.key, outcomes.RECOMPUTING))
        elif action in (A.END_REFUSED, A.END_FAILED):
            self.counters.handoffs_failed += 1
            self._outcomes.append(HandoffFailed(record.key, record.reason, outcomes.is_retryable(record.reason)))
