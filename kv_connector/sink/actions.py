"""Carries out the actions of a sink's machines as messages to sources, jobs, blocks taken and freed, and outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVCommitted, KVDrainedAck, KVRefused, KVResend, KVWait
from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import Send, SinkEffect
from tandem.kv_connector.protocol.jobs import CloseGrant, OpenGrant, Verify, digest_key
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.outcomes import Commit, Failed, Fetched, NotFetched, Recompute, Released
from tandem.kv_connector.protocol.sink_table import SinkAction as A
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.record import SinkRecord


class SinkActions:
    """Runs actions on records of `ledger`; what is to be done elsewhere is appended to `effects`."""

    def __init__(self, ledger: SinkLedger, effects: list[SinkEffect], verifies: bool) -> None:
        self._ledger, self._effects, self._verifies = ledger, effects, verifies
        self._verifying: set[AttemptKey] = set()

    def run(self, record: SinkRecord, actions: Sequence[A]) -> None:
        if A.RECOMPUTE in actions:  # whatever the reason was, the source must not report a failure
            record.reason = outcomes.RECOMPUTING
        for action in actions:
            if action.value.startswith("send_"):
                to = record.source
                self._effects.append(Send(to, self._message(record, action)))
            else:
                self._act(record, action)
        if record.machine.state is S.VERIFYING:
            self._verifying.add(record.key)
        else:
            self._verifying.discard(record.key)

    @property
    def num_verifying(self) -> int:
        """The number of hand-offs whose bytes are all here and are being checked."""
        return len(self._verifying)

    def check_integrity(self) -> None:
        for record in self._ledger.records.values():
            state = record.machine.state
            assert (state is S.VERIFYING) == (record.key in self._verifying), f"{record.key} is {state}"

    def _message(self, record: SinkRecord, action: A) -> Message:
        request_id, attempt = record.key
        grant_id = record.machine.grant_id
        if action is A.SEND_WAIT:
            return KVWait(request_id=request_id, attempt=attempt)
        if action is A.SEND_GRANT:
            assert record.grant is not None
            return record.grant
        if action is A.SEND_COMMITTED:
            return KVCommitted(request_id=request_id, attempt=attempt, grant_id=grant_id)
        if action is A.SEND_RESEND:
            indices, round = record.bad_indices, record.machine.round
            return KVResend(request_id=request_id, attempt=attempt, grant_id=grant_id, indices=indices, round=round)
        if action is A.SEND_REFUSED:
            return KVRefused(request_id=request_id, attempt=attempt, reason=record.reason or outcomes.UNKNOWN)
        assert action is A.SEND_ACK
        return KVDrainedAck(request_id=request_id, attempt=attempt, grant_id=grant_id)

    def _act(self, record: SinkRecord, action: A) -> None:
        if action is A.OPEN_GRANT:
            assert record.grant is not None
            self._effects.append(OpenGrant(record.grant))
        elif action is A.CLOSE_GRANT:
            assert record.grant is not None
            self._effects.append(CloseGrant(record.grant.grant_id))
            if record.machine.state is S.QUARANTINED:
                record.quarantined_at = self._ledger.now
                self._ledger.counters.blocks_quarantined += len(record.granted)
        elif action is A.VERIFY:
            self._verify(record)
        elif action is A.UNPIN:
            self._ledger.unpin(record)
        elif action is A.FREE:
            self._ledger.free_granted(record)
        else:
            self._end(record, action)

    def _verify(self, record: SinkRecord) -> None:
        assert record.grant is not None
        assert record.ready is not None
        if record.ready.continuation is not None:
            self._ledger.shorten(record, record.ready.continuation.num_tokens)
        if not self._verifies and not record.ready.digests:
            self.run(record, record.machine.on_verified(record.grant.grant_id, record.machine.round, True))
            return
        valid_last = (record.num_tokens - 1) % self._ledger.block_size + 1
        key = digest_key(record.key, record.grant.grant_id)
        blocks, digests = self._ledger.granted_ids(record), record.ready.digests
        job = Verify(record.key, record.grant.grant_id, record.machine.round, blocks, digests, key, valid_last)
        self._effects.append(job)

    def _end(self, record: SinkRecord, action: A) -> None:
        request = record.request
        if action is A.END_CANCELLED:
            return
        if record.kind is HandoffKind.PULL:
            self._end_pull(record, action)
            return
        assert request is not None, "a claim without its Submit ends in no outcome"
        if action is A.COMMIT:
            assert record.ready is not None
            self._ledger.counters.commits += 1
            num_cached = record.num_found * self._ledger.block_size
            blocks = self._ledger.take(record)
            self._effects.append(
                Commit(request, blocks, record.ready.first_tokens, num_cached, record.ready.continuation)
            )
        elif action is A.RECOMPUTE:
            assert record.ready is not None
            self._ledger.counters.recomputes += 1
            self._effects.append(Recompute(request, record.ready.first_tokens, record.ready.continuation))
        elif action is A.END_RELEASED:
            self._effects.append(Released(request))
        else:
            self._ledger.counters.failures += 1
            self._effects.append(Failed(request, record.reason, outcomes.is_retryable(record.reason)))

    def _end_pull(self, record: SinkRecord, action: A) -> None:
        if action is A.COMMIT:
            self._effects.append(Fetched(record.key, tuple(record.granted)))
            record.granted = []
        else:
            self._effects.append(NotFetched(record.key, record.reason))
