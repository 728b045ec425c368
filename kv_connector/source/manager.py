"""The source's hand-offs: one SourceMachine each, fed by the scheduler, the sinks' messages and the transfer thread.

Implements engine.interfaces.KVConnectorScheduler for prefill nodes: prompts that are pushed while they are computed.
`offer` hands over KV that exists already. Pure: messages, jobs and effects are queued and drained by the node's main;
time comes in by `on_tick` and friends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.wire.handoff import (
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVRefused,
    KVResend,
    KVWait,
)
from tandem.engine.contracts.wire.parts import FirstToken, Message, NodeInfo, PeerRef, peer_id_of
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.jobs import Flushed, PushFailed, ReadySent, Retired, SourceStepMeta
from tandem.kv_connector.protocol.peer_effects import PeerFailed
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.grant_check import GrantCheck
from tandem.kv_connector.source.peers import OVER, SourcePeers
from tandem.kv_connector.source.record import SourceRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

TOMBSTONE_S = 120.0
_PARKED = (S.PARKED, S.PARKED_DONE)
_UNFINISHED = (S.CLAIMING, S.PUSHING)
_AWAITS_GRANT = (S.CLAIMING, S.PARKED)
# Waits for the transfer thread of this process; no deadline, see _warn_of_slow_retire. All other states have one.
_BEING_RETIRED = (S.DRAINING, S.RETIRING)
_SENDS_AGAIN = (S.CLAIMING, S.PARKED, S.PARKED_DONE, S.READY, S.DRAINING, S.DRAINED)


class SourceManager(SourcePeers):
    """`pool` is shared with the scheduler; blocks that `request_finished` took over are freed here."""

    def __init__(self, info: NodeInfo, keys: ClusterKeys, pool: BlockPool, options: NodeOptions) -> None:
        super().__init__(info, pool, options)
        self._grant_check = GrantCheck(keys, info.node_id)
        # Rows of up to so many tokens are pushed whole behind their step, which may then be a graph's: launching it and
        # its pushes layer by layer takes the host longer than these bytes take.
        self.whole_up_to = 0
        self._max_parked = int(options.scheduler.parked_kv_fraction * pool.num_blocks)

    # --- requests -------------------------------------------------------------------------------------------

    def expect(self, request_id: str, attempt: int, peer: PeerRef, num_prompt_tokens: int, deadline: float) -> None:
        """A prompt that will be handed to `peer`; before the scheduler gets it."""
        self._add((request_id, attempt), peer, num_prompt_tokens, deadline)

    def cancel(self, request_id: str, attempt: int, now: float) -> None:
        self._now = now
        record = self._records.get((request_id, attempt))
        if record is not None:
            record.reason = outcomes.CANCELLED
            self._run(record, record.machine.on(E.CANCEL))

    # --- scheduler half of the connector --------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        record = self._records.get(request.key)
        if record is None or (record.peer.node_id, record.peer.epoch) not in self._peers:
            return None
        record.request = request
        if record.machine.state is S.IDLE and self._fits_beside_parked(record):
            self._note_block_sizes(record)
            self._run(record, record.machine.on(E.CLAIM))
        state = record.machine.state
        if state is S.CLAIMING:
            return 0 if self._may_park(record) else None
        return 0 if state in (S.PARKED, S.PUSHING) else None

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        record = self._records[request.key]
        first = not record.block_ids
        record.blocks_allocated(block_ids, request.num_computed_tokens)
        if first:
            self._run(record, record.machine.on(E.START))

    def build_connector_meta(self, output: SchedulerOutput) -> SourceStepMeta | None:
        by_slot = {
            record.request.slot: record
            for record in self._records.values()
            if record.request is not None and record.request.slot >= 0 and record.block_ids
        }
        pushes, whole, awaits_grant, by_layer = [], [], False, False
        for row in output.rows:
            record = by_slot.get(row.slot)
            if record is None:
                continue
            pushing = record.machine.state is S.PUSHING
            awaits_grant |= record.machine.state in _AWAITS_GRANT
            before = record.take_whole_push(row.start, record.last_step) if pushing else None
            whole += [before] if before is not None else []
            record.step_built(output.step_id, row.start + row.num_tokens)
            is_small = row.num_tokens <= self.whole_up_to
            by_layer |= not is_small
            if pushing and is_small:
                behind = record.take_whole_push(record.num_computed_tokens, output.step_id)
                whole += [behind] if behind is not None else []
            elif pushing:
                now = record.take_layer_push()
                pushes += [now] if now is not None else []
        if not pushes and not whole and not awaits_grant:
            return None
        return SourceStepMeta(output.step_id, tuple(pushes), tuple(whole), by_layer)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        record = self._records.get(request.key)
        if record is None or record.machine.state in OVER:
            return False
        record.request = None
        record.block_ids, record.owns_blocks = list(block_ids), True
        if len(request.first_tokens) < len(request.sample_indices):  # aborted or failed
            record.reason = record.reason or outcomes.CANCELLED
            self._run(record, record.machine.on(E.CANCEL))
        else:
            record.first_tokens = tuple(FirstToken(*token) for token in request.first_tokens)
            ended = all(token.finished for token in record.first_tokens)
            record.reason = outcomes.FINISHED if ended else ""
            self._run(record, record.machine.on(E.ALL_FINISHED if ended else E.COMPUTED))
        return True

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def on_message(self, peer_id: str, message: Message, now: float) -> None:
        """From a sink. Messages that fit no live hand-off are dropped and counted, but a refusal is answered."""
        self._now = now
        key = (getattr(message, "request_id", ""), getattr(message, "attempt", 0))
        record = self._records.get(key)
        if record is None or peer_id_of(record.peer.node_id, record.peer.epoch) != peer_id:
            self._answer_stranger(peer_id, message)
            return
        machine = record.machine
        if isinstance(message, KVGrant):
            self._on_grant(record, message)
        elif isinstance(message, KVWait):
            self._run(record, machine.on(E.WAIT))
        elif isinstance(message, KVCommitted):
            self._run(record, machine.on_committed(message.grant_id))
        elif isinstance(message, KVResend):
            self._on_resend(record, message)
        elif isinstance(message, KVRefused):
            record.reason = message.reason
            self._run(record, machine.on(E.REFUSED))
        elif isinstance(message, KVDrainedAck):
            self._run(record, machine.on(E.DRAINED_ACK))
        else:
            self.counters.messages_dropped += 1

    def on_transfer_event(self, event: object, now: float) -> None:
        self._now = now
        if isinstance(event, PeerFailed):
            self._open.discard((event.node_id, event.epoch))
            return
        assert isinstance(event, ReadySent | Flushed | PushFailed | Retired), f"no event of a source: {event}"
        record = self._records.get(event.key)
        if record is None:
            self.counters.events_dropped += 1
        elif isinstance(event, ReadySent):
            record.ready = event.ready
            self._run(record, record.machine.on_sent(event.grant_id, event.ready.round))
            if record.machine.state is S.READY:
                self._await_answer(record)
        elif isinstance(event, Flushed):
            record.is_flushed |= event.grant_id == record.machine.grant_id
        elif isinstance(event, PushFailed):
            record.reason = event.reason
            self._run(record, record.machine.on_push_failed(event.grant_id))
        else:
            self._run(record, record.machine.on_retired(event.grant_id))

    def on_tick(self, now: float) -> None:
        self._now = now
        for record in list(self._records.values()):
            if record.machine.state is S.CLOSED:
                if now - record.closed_at > TOMBSTONE_S and not record.owns_blocks:
                    del self._records[record.key]
                continue
            if record.machine.state in _BEING_RETIRED:
                self._warn_of_slow_retire(record)
            elif now >= record.deadline:
                record.reason = outcomes.DEADLINE
                self._run(record, record.machine.on(E.DEADLINE))
            if now >= record.resend_at > 0 and record.machine.state in _SENDS_AGAIN:
                self._wait_longer(record)
                self.counters.verbs_resent += 1
                self._run(record, record.machine.on(E.TIMER))

    # --- out ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return all(record.machine.state in OVER for record in self._records.values())

    def check_integrity(self) -> None:
        for record in self._records.values():
            state = record.machine.state
            if record.owns_blocks:
                assert state not in OVER, f"{record.key} is over and holds blocks"
                for block_id in record.block_ids:
                    assert self._pool.ref_count(block_id) > 0, f"{record.key} holds block {block_id}, which is free"

    # --- inside ---------------------------------------------------------------------------------------------

    def _num_parked_blocks(self) -> int:
        return sum(record.num_blocks for record in self._records.values() if record.machine.state in _PARKED)

    def _fits_beside_parked(self, record: SourceRecord) -> bool:
        """Whether `record` may claim. A claim that got the sink's blocks before those of parked prompts, for prompts
        that it does not fit beside here, would make each pool wait for the other."""
        return self._num_parked_blocks() + record.num_blocks <= self._pool.num_blocks

    def _may_park(self, record: SourceRecord) -> bool:
        """Whether `record` may start without a grant: parked KV keeps to its share of the pool, and leaves room for the
        largest prompt that claimed before, since its grant comes first and the parked ones wait behind it, and for
        those that were asked for and can't claim until parked ones have left, or new ones would keep them out."""
        unfinished = [
            other.num_blocks
            for other in self._records.values()
            if other is not record
            and (other.machine.state in _UNFINISHED or (other.machine.state is S.IDLE and other.request is not None))
        ]
        room = self._pool.num_blocks - max(unfinished, default=0)
        return self._num_parked_blocks() + record.num_blocks <= min(self._max_parked, room)

    def _on_grant(self, record: SourceRecord, grant: KVGrant) -> None:
        """Checked before the first write; a grant that is not meant for this hand-off is refused and counted."""
        try:
            self._grant_check.check(record, grant)
        except GrantError:
            self.counters.grants_refused += 1
            return
        before = record.machine.grant_id
        actions = record.machine.on_grant(grant.grant_id, grant.source_epoch, grant.sink_epoch)
        if record.machine.grant_id != before:
            self._grant_check.note_use(grant.grant_id)
            self._open_channel(record.peer)  # a sink that grants has lifted the bar of its fence
            record.adopt(grant)
            record.resend_at = 0.0
        self._run(record, actions)

    def _on_resend(self, record: SourceRecord, resend: KVResend) -> None:
        if record.grant is None or not all(index < len(record.grant.block_ids) for index in resend.indices):
            self.counters.messages_dropped += 1
            return
        record.resend_indices = resend.indices
        self._run(record, record.machine.on_resend(resend.grant_id, resend.round))

    def _answer_stranger(self, peer_id: str, message: Message) -> None:
        """No record means: no grant is held and no job is queued, so nothing of that attempt can land."""
        self.counters.messages_dropped += 1
        if isinstance(message, KVRefused):
            drained = KVDrained(
                request_id=message.request_id, attempt=message.attempt, source_epoch=self.info.epoch, grant_id=0
            )
            self._outbox.append((peer_id, drained))
