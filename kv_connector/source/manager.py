"""The source's hand-offs: one SourceMachine each, fed by the scheduler, the sinks' messages and the transfer thread.

`prompts` pushes what is being computed, `offer` hands over KV that exists already, `follow` a sequence that runs. Pure:
decisions are put into `effects`; time comes in with each event.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import (
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVRefused,
    KVResend,
    KVWait,
)
from tandem.engine.contracts.wire.parts import AttemptMessage, Continuation, Message, NodeInfo, PeerRef
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import Send, SourceEffect
from tandem.kv_connector.protocol.jobs import Flush, Flushed, PushFailed, ReadySent, Retired
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.peer_effects import PeerFailed
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.chunks import PushedChunks
from tandem.kv_connector.source.grant_check import GrantCheck
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.peers import CLAIMED, SourcePeers
from tandem.kv_connector.source.prompts import PushedPrompts
from tandem.kv_connector.source.record import NO_STEP, SourceRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

logger = logging.getLogger(__name__)
TOMBSTONE_S, CHUNK_TOMBSTONE_S = 120.0, 10.0  # guesses; of the latter there are many
MOST_PARKED = 0.25  # of a pool whose node computes for those that compute for it: docs/blocks.md
# States that wait for the transfer thread of this process. They alone have no deadline: see _warn_of_slow_retire.
_BEING_RETIRED = (S.DRAINING, S.RETIRING)
_LIVE = (S.IDLE, S.CLAIMING, S.PARKED, S.PARKED_DONE, S.PUSHING, S.FINALIZING, S.READY)
_SENDS_AGAIN = (S.CLAIMING, S.PARKED, S.PARKED_DONE, S.READY, S.DRAINING, S.DRAINED)


class SourceManager:
    """Decides on all hand-offs of which this node is the source. `pool` is shared with the scheduler; a block that the
    scheduler has left to a hand-off is freed here.

    Its parts: `ledger` (records and their blocks), `actions` (what a machine's actions mean), `peers` (sinks and
    channels to them), `prompts` and `chunks` (those that are computed here while they are pushed)."""

    def __init__(
        self, info: NodeInfo, keys: ClusterKeys, pool: BlockPool, options: NodeOptions, whole_up_to: int = 0
    ) -> None:
        """`whole_up_to` (tokens) is explained at PushedPrompts."""
        self.info = info
        self.effects: list[SourceEffect] = []
        self.ledger = SourceLedger(info, pool, options)
        self.actions = SourceActions(self.ledger, self.effects, options)
        self.peers = SourcePeers(self.ledger, self.actions, self.effects)
        share = options.scheduler.parked_kv_fraction
        max_parked = int((min(share, MOST_PARKED) if options.role == "unified" else share) * pool.num_blocks)
        self.prompts = PushedPrompts(self.ledger, self.actions, self.peers, max_parked, whole_up_to)
        self.chunks = PushedChunks(self.ledger, self.actions, self.peers)
        self.counters = self.ledger.counters
        self._warn_s = options.timeouts.quarantine_warn_s
        self._grant_check = GrantCheck(keys, info.node_id)

    # --- requests -------------------------------------------------------------------------------------------

    def expect(self, key: AttemptKey, peer: PeerRef, num_prompt_tokens: int, deadline: float) -> None:
        """Announces a prompt that will be handed to `peer`, before the scheduler gets it. `deadline`: monotonic
        seconds."""
        self._add(key, HandoffKind.PROMPT, peer, num_prompt_tokens, deadline)

    def cancel(self, key: AttemptKey, now: float) -> None:
        self.ledger.at(now)
        record = self.ledger.records.get(key)
        if record is not None:
            record.reason = outcomes.CANCELLED
            self.actions.run(record, record.machine.on(E.CANCEL))

    # --- KV that exists already -----------------------------------------------------------------------------

    def offer(
        self, key: AttemptKey, peer: PeerRef, block_ids: Sequence[int], num_tokens: int, deadline: float, now: float
    ) -> None:
        """Hands the KV of `num_tokens` tokens, all written, to `peer`, which expects it: they are in `block_ids`, in
        order of position. One reference to each block passes to the hand-off. It claims as soon as `peer` is connected
        and ends like any other."""
        self.ledger.at(now)
        assert len(block_ids) == -(-num_tokens // self.ledger.block_size), "the blocks of just these tokens"
        record = self._add(key, HandoffKind.PULL, peer, num_tokens, deadline)
        record.block_ids, record.owns_blocks = list(block_ids), True
        record.num_computed_tokens = num_tokens
        if self.peers.knows(peer):
            self.peers.claim_offer(record)

    def withdraw(self, key: AttemptKey) -> bool:
        """Ends, without an outcome, an offer that nobody has granted room for. Returns False if it was granted or is
        over."""
        withdrawn = self.ledger.records[key].machine.state in (S.IDLE, *CLAIMED)
        if withdrawn:
            self.cancel(key, self.ledger.now)
        return withdrawn

    # --- running sequences ----------------------------------------------------------------------------------

    def follow(
        self, key: AttemptKey, peer: PeerRef, most_tokens: int, deadline: float, now: float, first_kept: int = 0
    ) -> None:
        """Claims room at `peer`, which expects it, for a sequence that runs on meanwhile and has at most `most_tokens`
        tokens of KV when it is handed over; it has given back what is before token `first_kept`, and gives back no
        more. While `is_pushing`, the caller says with `push_settled`, and at last with `hand_over`, which KV exists.
        The hand-off ends like any other."""
        self.ledger.at(now)
        record = self._add(key, HandoffKind.SEQUENCE, peer, most_tokens, deadline)
        record.first_kept = first_kept
        if self.peers.knows(peer):
            self.peers.claim_offer(record)

    def push_settled(self, key: AttemptKey, block_ids: Sequence[int], num_tokens: int, now: float) -> int:
        """Pushes the full blocks of the first `num_tokens` tokens, which are written and stay as they are, unless that
        was done before. `block_ids` are the sequence's blocks from its first token on. Returns how many blocks of the
        sink's size there were to push."""
        self.ledger.at(now)
        record = self.ledger.records[key]
        num_full = num_tokens // self.ledger.block_size
        self.ledger.hold(record, block_ids[:num_full])
        record.num_computed_tokens = num_full * self.ledger.block_size
        push = record.take_whole_push(record.num_computed_tokens, NO_STEP)
        if push is None:
            return 0
        assert record.grant is not None
        self.effects += [push, Flush(key, record.grant)]
        record.is_flushed = False
        return len(push.num_valid)

    def hand_over(self, key: AttemptKey, block_ids: Sequence[int], continuation: Continuation, now: float) -> None:
        """Hands over a sequence that stands still: pushes the blocks that are left, and tells the sink how it goes
        on."""
        self.ledger.at(now)
        record = self.ledger.records[key]
        num_tokens = continuation.num_tokens
        self.ledger.hold(record, block_ids[: -(-num_tokens // self.ledger.block_size)])
        record.num_prompt_tokens = record.num_computed_tokens = num_tokens
        record.continuation = continuation
        self.actions.run(record, record.machine.on(E.COMPUTED))

    def is_pushing(self, key: AttemptKey) -> bool:
        """Whether the hand-off has been granted, and neither handed over nor ended."""
        return key in self.ledger.records and self.ledger.records[key].machine.state is S.PUSHING

    def is_flushed(self, key: AttemptKey) -> bool:
        """Whether what was pushed so far has arrived."""
        return key in self.ledger.records and self.ledger.records[key].is_flushed

    def holds_blocks(self, key: AttemptKey) -> bool:
        """Whether a transfer may read blocks of the hand-off."""
        return key in self.ledger.records and self.ledger.records[key].owns_blocks

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def on_message(self, sender: NodeKey, message: Message, now: float) -> None:
        """Takes a sink's message. One that fits no live hand-off is dropped and counted, except that a refusal is
        answered."""
        self.ledger.at(now)
        record = self.ledger.records.get(message.key) if isinstance(message, AttemptMessage) else None
        if record is None or record.peer.key != sender:
            self._answer_stranger(sender, message)
            return
        machine = record.machine
        if isinstance(message, KVGrant):
            self._on_grant(record, message)
        elif isinstance(message, KVWait):
            self.actions.run(record, machine.on(E.WAIT))
        elif isinstance(message, KVCommitted):
            self.actions.run(record, machine.on_committed(message.grant_id))
        elif isinstance(message, KVResend):
            self._on_resend(record, message)
        elif isinstance(message, KVRefused):
            record.reason = message.reason
            self.actions.run(record, machine.on(E.REFUSED))
        elif isinstance(message, KVDrainedAck):
            self.actions.run(record, machine.on(E.DRAINED_ACK))
        else:
            self.counters.messages_dropped += 1

    def on_transfer_event(self, event: object, now: float) -> None:
        self.ledger.at(now)
        if isinstance(event, PeerFailed):
            self.peers.channel_failed(event.node)
            return
        assert isinstance(event, ReadySent | Flushed | PushFailed | Retired), f"no event of a source: {event}"
        record = self.ledger.records.get(event.key)
        if record is None:
            self.counters.events_dropped += 1
        elif isinstance(event, ReadySent):
            record.ready = event.ready
            self.actions.run(record, record.machine.on_sent(event.grant_id, event.ready.round))
            if record.machine.state is S.READY:
                self.actions.await_answer(record)
        elif isinstance(event, Flushed):
            record.is_flushed |= event.grant_id == record.machine.grant_id
        elif isinstance(event, PushFailed):
            record.reason = event.reason
            self.actions.run(record, record.machine.on_push_failed(event.grant_id))
        else:
            self.actions.run(record, record.machine.on_retired(event.grant_id))

    def on_tick(self, now: float) -> None:
        self.ledger.at(now)
        for record in list(self.ledger.records.values()):
            if record.machine.state is S.CLOSED:
                kept_s = CHUNK_TOMBSTONE_S if record.kind is HandoffKind.CHUNK else TOMBSTONE_S
                if now - record.closed_at > kept_s and not record.owns_blocks:
                    del self.ledger.records[record.key]
                continue
            if record.machine.state in _BEING_RETIRED:
                self._warn_of_slow_retire(record)
            elif now >= record.deadline:
                record.reason = outcomes.DEADLINE
                self.actions.run(record, record.machine.on(E.DEADLINE))
            if now >= record.resend_at > 0 and record.machine.state in _SENDS_AGAIN:
                self.actions.wait_longer(record)
                self.counters.verbs_resent += 1
                self.actions.run(record, record.machine.on(E.TIMER))

    # --- out ------------------------------------------------------------------------------------------------

    def drain_effects(self) -> list[SourceEffect]:
        """The effects decided on since the last call, in order."""
        effects = self.effects[:]
        self.effects.clear()
        return effects

    def knows(self, key: AttemptKey) -> bool:
        """Whether this hand-off exists, or ended less than TOMBSTONE_S ago."""
        return key in self.ledger.records

    def is_live(self, key: AttemptKey) -> bool:
        """Whether this hand-off may still end in an outcome."""
        return key in self.ledger.records and self.ledger.records[key].machine.state in _LIVE

    def check_integrity(self) -> None:
        self.ledger.check_integrity()

    # --- inside ---------------------------------------------------------------------------------------------

    def _add(self, key: AttemptKey, kind: HandoffKind, peer: PeerRef, num_tokens: int, deadline: float) -> SourceRecord:
        record = self.ledger.add(key, kind, peer, num_tokens, deadline)
        self.peers.open_channel(peer)
        return record

    def _on_grant(self, record: SourceRecord, grant: KVGrant) -> None:
        """Checks a grant before the first write; one that is not meant for this hand-off is refused and counted."""
        try:
            self._grant_check.check(record, grant)
        except GrantError:
            self.counters.grants_refused += 1
            return
        before = record.machine.grant_id
        actions = record.machine.on_grant(grant.grant_id, grant.source_epoch, grant.sink_epoch)
        if record.machine.grant_id != before:
            self._grant_check.note_use(grant.grant_id)
            self.peers.open_channel(record.peer)  # a sink that grants has lifted the bar of its fence
            record.adopt(grant)
            record.resend_at = 0.0
        self.actions.run(record, actions)

    def _on_resend(self, record: SourceRecord, resend: KVResend) -> None:
        if record.grant is None or not all(index < len(record.grant.block_ids) for index in resend.indices):
            self.counters.messages_dropped += 1
            return
        record.resend_indices = resend.indices
        self.actions.run(record, record.machine.on_resend(resend.grant_id, resend.round))

    def _answer_stranger(self, sender: NodeKey, message: Message) -> None:
        """Answers a refusal of an unknown hand-off: without a record no grant is held and no job is queued, so nothing
        of that attempt can land."""
        self.counters.messages_dropped += 1
        if isinstance(message, KVRefused):
            drained = KVDrained(
                request_id=message.request_id, attempt=message.attempt, source_epoch=self.info.epoch, grant_id=0
            )
            self.effects.append(Send(sender, drained))

    def _warn_of_slow_retire(self, record: SourceRecord) -> None:
        """Warns once when a Retire takes long. The transfer thread answers each one, since all its waits have
        deadlines; if it hangs all the same, nothing but the end of this process makes the blocks safe to reuse."""
        waited = self.ledger.now - record.retire_asked_at
        if waited < self._warn_s or record.was_warned:
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
