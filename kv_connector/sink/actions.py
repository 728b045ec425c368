"""What the actions of a sink's machines mean: messages to sources, jobs, blocks, outcomes. See
kv_connector/source/actions.py."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.handoff import KVCommitted, KVDrainedAck, KVRefused, KVResend, KVWait
from tandem.engine.contracts.wire.parts import Message, NodeInfo, peer_id_of
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.action_queues import ActionQueues
from tandem.kv_connector.protocol.jobs import CloseGrant, HandoffKey, OpenGrant, Verify, digest_key
from tandem.kv_connector.protocol.outcomes import Commit, Failed, Fetched, NotFetched, Recompute, Released, SinkOutcome
from tandem.kv_connector.protocol.sink_table import SinkAction as A
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.record import SinkRecord

logger = logging.getLogger(__name__)


@dataclass
class SinkCounters:
    commits: int = 0
    recomputes: int = 0
    failures: int = 0
    digest_mismatches: int = 0
    foreign_messages: int = 0
    blocks_quarantined: int = 0
    quarantines_overdue: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f"sink_{name}": float(value) for name, value in vars(self).items()}


class SinkActionRunner(ActionQueues[SinkOutcome]):
    """Runs actions on records. `_now` (monotonic seconds) is set by whoever brings an event."""

    def __init__(self, info: NodeInfo, pool: BlockPool, options: NodeOptions) -> None:
        super().__init__()
        self.info = info
        self.counters = SinkCounters()
        self._pool = pool
        self._options = options
        self._block_size = options.cache.block_size
        self._queue: deque[SinkRecord] = deque()
        self._verifying: set[HandoffKey] = set()
        self._now = 0.0

    def _send(self, record: SinkRecord, message: Message) -> None:
        self._outbox.append((peer_id_of(record.source_id, record.machine.source_epoch), message))

    def _run(self, record: SinkRecord, actions: Sequence[A]) -> None:
        if A.RECOMPUTE in actions:  # whatever led to it: the source must not report a failure
            record.reason = outcomes.RECOMPUTING
        for action in actions:
            if action.value.startswith("send_"):
                self._send(record, self._message(record, action))
            else:
                self._act(record, action)
        if record.machine.state is S.VERIFYING:
            self._verifying.add(record.key)
        else:
            self._verifying.discard(record.key)

    @property
    def num_verifying(self) -> int:
        """Hand-offs whose bytes are all here, and being checked."""
        return len(self._verifying)

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
            self._commands.append(OpenGrant(record.grant))
        elif action is A.CLOSE_GRANT:
            assert record.grant is not None
            self._commands.append(CloseGrant(record.grant.grant_id))
            if record.machine.state is S.QUARANTINED:
                record.quarantined_at = self._now
                self.counters.blocks_quarantined += len(record.granted)
        elif action is A.VERIFY:
            self._verify(record)
        elif action is A.UNPIN:
            self._unpin(record)
        elif action is A.FREE:
            self._pool.free(record.granted, None)
            record.granted = []
        else:
            self._end(record, action)

    def _unpin(self, record: SinkRecord) -> None:
        self._pool.free(record.hits, None)
        record.hits = []

    def _warn_of_long_quarantine(self, record: SinkRecord) -> None:
        waited = self._now - record.quarantined_at
        if waited < self._options.timeouts.quarantine_warn_s or record.was_warned:
            return
        record.was_warned = True
        self.counters.quarantines_overdue += 1
        logger.warning(
            "request %s attempt %d: %d blocks are in quarantine for %.0f s; %s has neither said that it writes no more "
            "nor been fenced",
            *record.key,
            len(record.granted),
            waited,
            record.source_id,
        )

    def _verify(self, record: SinkRecord) -> None:
        assert record.grant is not None
        assert record.ready is not None
        if not self._options.digests and not record.ready.digests:
            self._run(record, record.machine.on_verified(record.grant.grant_id, record.machine.round, True))
            return
        self._shorten(record)
        valid_last = (record.num_tokens - 1) % self._block_size + 1
        key = digest_key(*record.key, record.grant.grant_id)
        blocks, digests = tuple(record.granted), record.ready.digests
        job = Verify(record.key, record.grant.grant_id, record.machine.round, blocks, digests, key, valid_last)
        self._jobs.append(job)

    def _shorten(self, record: SinkRecord) -> None:
        """A running sequence needs what was granted up to its length at the end; its source wrote no other block."""
        assert record.ready is not None
        if record.ready.continuation is None:
            return
        record.num_tokens = record.ready.continuation.num_tokens
        record.num_blocks = -(-record.num_tokens // self._block_size)
        num_needed = record.num_blocks - len(record.hits)
        self._pool.free(record.granted[num_needed:], None)
        del record.granted[num_needed:]

    def _end(self, record: SinkRecord, action: A) -> None:
        request = record.request
        if action is A.END_CANCELLED:
            return
        if record.most_blocks:
            self._end_pull(record, action)
            return
        if request is None:
            return
        if action is A.COMMIT:
            assert record.ready is not None
            self.counters.commits += 1
            num_cached = len(record.hits) * self._block_size
            blocks = self._kept_once(request, record)
            self._outcomes.append(
                Commit(request, blocks, record.ready.first_tokens, num_cached, record.ready.continuation)
            )
        elif action is A.RECOMPUTE:
            assert record.ready is not None
            self.counters.recomputes += 1
            self._outcomes.append(Recompute(request, record.ready.first_tokens, record.ready.continuation))
        elif action is A.END_RELEASED:
            self._outcomes.append(Released(request))
        else:
            self.counters.failures += 1
            self._outcomes.append(Failed(request, record.reason, outcomes.is_retryable(record.reason)))

    def _kept_once(self, request: Request, record: SinkRecord) -> tuple[int, ...]:
        """The request's blocks, out of the record's hands. What others with the same prefix brought since the grant
        takes the place of what came again: kept once it leaves room, and decodes read it together."""
        blocks = [*record.hits, *record.granted]
        record.hits, record.granted = [], []
        num_full = record.num_tokens // self._block_size
        known = self._pool.match_prefix(request.block_hashes[:num_full]) if request.use_prefix_cache else []
        twice = [index for index, block_id in enumerate(known) if block_id != blocks[index]]
        self._pool.touch(known[index] for index in twice)
        self._pool.free([blocks[index] for index in twice], None)
        for index in twice:
            blocks[index] = known[index]
        return tuple(blocks)

    def _end_pull(self, record: SinkRecord, action: A) -> None:
        if action is A.COMMIT:
            self._outcomes.append(Fetched(record.key, tuple(record.granted)))
            record.granted = []
        else:
            self._outcomes.append(NotFetched(record.key, record.reason))
