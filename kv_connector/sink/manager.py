"""The sink's hand-offs: tickets, the queue of claims, grants, verification, commit, quarantine. Pure, see
kv_connector/source/manager.py.

Blocks: `hits` (pinned prefix, shared) and `granted` (to be written by the source) of each record hold one reference
each until the machine says COMMIT, UNPIN or FREE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef, parts_of_peer_id
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.jobs import HandoffKey, Verified
from tandem.kv_connector.protocol.peer_effects import Fenced
from tandem.kv_connector.protocol.sink_table import SinkEvent as E
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.peers import ENDED, OVER, UNTIL_SAFE, SinkPeers
from tandem.kv_connector.sink.record import SinkRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

TOMBSTONE_S = 120.0
MAX_RESEND_S = 5.0
_UNDER_WAY = (S.GRANTED, S.VERIFYING, S.RESENDING)


class SinkManager(SinkPeers):
    """`pool` is shared with the scheduler. `is_settled` (grant id) says whether a source's word that it writes no more
    may be believed (Transport.is_settled): if not, the word is not heard, and comes again."""

    def __init__(
        self,
        info: NodeInfo,
        keys: ClusterKeys,
        pool: BlockPool,
        options: NodeOptions,
        is_settled: Callable[[int], bool] = lambda grant_id: True,
    ) -> None:
        super().__init__(info, keys, pool, options)
        self._is_settled = is_settled
        self.num_under_way = 0  # granted and not committed, at the last tick
        self._tombstones: deque[SinkRecord] = deque()  # in the order of their ends

    # --- requests -------------------------------------------------------------------------------------------

    def expect(self, submit: Submit, request: Request, now: float) -> int:
        """The ticket: pins this node's own prefix of the prompt, takes no new block; number of tokens pinned."""
        self._now = now
        record = self._record(request.key)
        record.deadline, record.expected_at = now + submit.deadline_s, now
        record.request = request
        record.num_tokens = request.num_prompt_tokens
        record.num_blocks = -(-request.num_prompt_tokens // self._block_size)
        assert submit.peer is not None, "a decode node is told who hands over"
        record.source_id = submit.peer.node_id
        record.follows = submit.is_running
        self._take_claimed(record)
        self._pin(record)
        num_cached = len(record.hits) * self._block_size
        self._run(record, record.machine.on_submit(submit.peer.epoch))
        if record.machine.state in OVER:
            self._unpin(record)
        elif -(-(record.num_tokens + 1) // self._block_size) > self._pool.num_blocks:  # with its first token's KV
            record.reason = outcomes.TOO_LARGE
            self._run(record, record.machine.on(E.DEADLINE))
        self._settle(record)
        return num_cached

    def fetch(self, key: HandoffKey, source: PeerRef, most_blocks: int, deadline: float, now: float) -> None:
        """Expects `source` to claim up to `most_blocks` whole blocks, which this node is about to ask it for. Ends in
        Fetched or NotFetched; no later than at `deadline`, unless cancelled."""
        self._now = now
        record = self._record(key)
        record.source_id, record.deadline, record.expected_at = source.node_id, deadline, now
        record.most_blocks = most_blocks
        self._run(record, record.machine.on_submit(source.epoch))

    def is_unanswered(self, key: HandoffKey) -> bool:
        """Whether the source has not been heard of in this hand-off."""
        record = self._records.get(key)
        return record is not None and record.machine.state is S.EXPECTING

    def cancel(self, request_id: str, attempt: int, now: float) -> None:
        self._now = now
        record = self._records.get((request_id, attempt))
        if record is not None:
            self._because(record, outcomes.CANCELLED)
            self._run(record, record.machine.on(E.CANCEL))
            self._settle(record)

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def on_message(self, peer_id: str, message: Message, now: float) -> None:
        """From a source; one that speaks for another node or epoch than its connection is not heard."""
        self._now = now
        if not isinstance(message, KVClaim | KVReady | KVRelease | KVDrained):
            self.counters.foreign_messages += 1
            return
        source_id, epoch = parts_of_peer_id(peer_id)
        known = self._records.get((message.request_id, message.attempt))
        expected = known.source_id if known is not None and known.source_id else source_id
        if source_id != expected or epoch != message.source_epoch:
            self.counters.foreign_messages += 1
            return
        record = self._record((message.request_id, message.attempt))
        record.source_id = source_id
        machine = record.machine
        if isinstance(message, KVClaim) and (source_id, message.source_epoch) in self._lost:
            self.counters.foreign_messages += 1  # no grant before it is greeted again: no fence to come would cover it
        elif isinstance(message, KVClaim):
            self._on_claim(record, message)
        elif isinstance(message, KVReady):
            self._on_ready(record, message)
        elif isinstance(message, KVRelease):
            self._because(record, message.reason)
            self._run(record, machine.on_release(message.source_epoch))
        elif self._is_settled(message.grant_id):
            self._run(record, machine.on_drained(message.source_epoch, message.grant_id))
        self._settle(record)

    def on_transfer_event(self, event: object, now: float) -> None:
        self._now = now
        if isinstance(event, Fenced):
            self.fenced(event.node_id, event.epoch)
        elif isinstance(event, Verified):
            record = self._records.get(event.key)
            if record is not None:
                self._on_verified(record, event)

    def on_tick(self, now: float) -> None:
        self._now = now
        self.num_under_way = 0
        for record in list(self._live.values()):
            state = record.machine.state
            if state in ENDED:
                record.closed_at = record.closed_at or now
                self._tombstones.append(self._live.pop(record.key))
            elif state is not S.UNKNOWN:
                self._tick(record)
                self.num_under_way += record.machine.state in _UNDER_WAY
            elif now >= record.deadline:  # it was only asked for
                del self._live[record.key], self._records[record.key]
        while self._tombstones and now - self._tombstones[0].closed_at > TOMBSTONE_S:
            del self._records[self._tombstones.popleft().key]
        self._grant_in_order()

    def _tick(self, record: SinkRecord) -> None:
        if record.machine.state in UNTIL_SAFE:
            self._warn_of_long_quarantine(record)
        elif self._now >= record.deadline:
            was_asked = record.request is not None or record.most_blocks
            record.reason = outcomes.DEADLINE if was_asked else outcomes.EARLY
            self._run(record, record.machine.on(E.DEADLINE))
        if record.machine.state is S.EXPECTING and self._has_stayed_away(record):
            record.reason = outcomes.SOURCE_LOST
            self._run(record, record.machine.on_source_lost(record.machine.source_epoch))
        if record.lease_until and self._now >= record.lease_until and record.machine.state in (S.GRANTED, S.RESENDING):
            record.reason = outcomes.LEASE
            self._run(record, record.machine.on(E.LEASE))
        if record.machine.state in (S.RESENDING, S.QUARANTINED) and self._now >= record.resend_at:
            every = max(2 * record.resend_every_s, self._options.timeouts.resend_s)
            record.resend_every_s = min(every, MAX_RESEND_S)
            record.resend_at = self._now + record.resend_every_s
            self._run(record, record.machine.on(E.TIMER))
        self._settle(record)

    # --- out ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No hand-off is under way; quarantined blocks die with this process."""
        return all(r.machine.state in (*OVER, S.QUARANTINED) for r in self._live.values())

    @property
    def num_quarantined(self) -> int:
        return sum(len(r.granted) for r in self._live.values() if r.machine.state is S.QUARANTINED)

    def check_integrity(self) -> None:
        assert len(self._records) == len(self._live) + len(self._tombstones)
        for record in self._records.values():
            state = record.machine.state
            assert (state is S.VERIFYING) == (record.key in self._verifying), f"{record.key} is {state}"
            assert state not in OVER or not (record.hits or record.granted), f"{record.key} is over and holds blocks"
            assert state is not S.QUARANTINED or not record.hits, f"{record.key} is over and pins hits"
            for block_id in (*record.hits, *record.granted):
                assert self._pool.ref_count(block_id) > 0, f"{record.key} holds block {block_id}, which is free"

    # --- inside ---------------------------------------------------------------------------------------------

    def _record(self, key: HandoffKey) -> SinkRecord:
        record = self._records.get(key)
        if record is None:
            early = self._now + self._options.timeouts.connect_s
            record = SinkRecord(key, SinkMachine(self.info.epoch), deadline=early)
            self._records[key] = self._live[key] = record
        return record

    def _on_ready(self, record: SinkRecord, ready: KVReady) -> None:
        if record.grant is not None and ready.grant_signature != record.grant.signature:
            self.counters.foreign_messages += 1
            return
        if record.grant is not None and record.ready is None and not self._makes_sense(record, ready):
            self.counters.foreign_messages += 1
            return
        before = record.machine.state
        actions = record.machine.on_ready(ready.grant_id, ready.source_epoch, ready.sink_epoch, ready.round)
        if record.machine.state is S.VERIFYING and before is not S.VERIFYING:
            record.ready = ready
        self._run(record, actions)

    def _makes_sense(self, record: SinkRecord, ready: KVReady) -> bool:
        """Whether sequences can go on behind what it says: tokens of this model, of samples that were asked for."""
        named = [token.sample_index for token in ready.first_tokens]
        if record.request is not None and not set(named) <= set(record.request.sample_indices):
            return False
        continuation = ready.continuation
        tokens = [token.token_id for token in ready.first_tokens]
        if continuation is not None:
            tokens += continuation.token_ids
            if self.info.max_model_len and continuation.num_tokens >= self.info.max_model_len:
                return False
        if len(set(named)) < len(named) or (self.info.vocab_size and max(tokens, default=0) >= self.info.vocab_size):
            return False
        return record.follows == (continuation is not None) and record.fits(continuation, self._block_size)

    def _on_verified(self, record: SinkRecord, event: Verified) -> None:
        record.bad_indices = event.bad_indices
        if event.bad_indices:
            self.counters.digest_mismatches += 1
            record.reason = outcomes.RECOMPUTING
        self._run(record, record.machine.on_verified(event.grant_id, event.round, not event.bad_indices))
        self._settle(record)
