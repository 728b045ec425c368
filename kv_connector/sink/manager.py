"""The sink's hand-offs: tickets, the line of claims, grants, verification, commit, quarantine.

Pure: decisions are put into `effects`; time comes in with each event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVGrant, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import SinkEffect
from tandem.kv_connector.protocol.jobs import Verified
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.peer_effects import Fenced
from tandem.kv_connector.protocol.sink_table import SinkEvent as E
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.actions import SinkActions
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.line import SinkLine
from tandem.kv_connector.sink.peers import SinkPeers
from tandem.kv_connector.sink.record import ENDED, OVER, UNTIL_SAFE, SinkRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

MAX_RESEND_S = 5.0  # a guess
_UNDER_WAY = (S.GRANTED, S.VERIFYING, S.RESENDING)
logger = logging.getLogger(__name__)


class SinkManager:
    """Decides on all hand-offs of which this node is the sink. `pool` is shared with the scheduler. `is_settled` (grant
    id) says whether a source that says that it writes no more may be believed (Transport.is_settled); if not, its
    message is dropped, and comes again.

    Its parts: `ledger` (records and their blocks), `actions` (what a machine's actions mean), `line` (who is granted
    next), `peers` (who may write)."""

    def __init__(
        self,
        info: NodeInfo,
        keys: ClusterKeys,
        pool: BlockPool,
        options: NodeOptions,
        is_settled: Callable[[int], bool] = lambda grant_id: True,
    ) -> None:
        self.info = info
        self.effects: list[SinkEffect] = []
        self.ledger = SinkLedger(info, pool, options)
        self.actions = SinkActions(self.ledger, self.effects, options.digests)
        self.line = SinkLine(self.ledger, self.actions, keys, options)
        self.peers = SinkPeers(self.ledger, self.actions, self.line, self.effects, options)
        self.counters = self.ledger.counters
        self.num_under_way = 0  # granted and not committed, at the last tick
        self._timeouts = options.timeouts
        self._is_settled = is_settled

    # --- requests -------------------------------------------------------------------------------------------

    def expect(self, submit: Submit, request: Request, now: float) -> int:
        """Makes the ticket of a hand-off: pins this node's own prefix of the prompt and takes no new block. Returns the
        number of tokens pinned."""
        self.ledger.at(now)
        record = self.ledger.open(request.key)
        record.deadline, record.expected_at = now + submit.deadline_s, now
        record.request = request
        record.num_tokens = request.num_prompt_tokens
        record.num_blocks = self.ledger.num_blocks_of(request.num_prompt_tokens)
        assert submit.peer is not None, "a decode node is told who hands over"
        record.source_id = submit.peer.node_id
        record.kind = HandoffKind.SEQUENCE if submit.is_running else HandoffKind.PROMPT
        self.ledger.pass_over(record)
        self.line.take_claimed(record)
        self.ledger.pin(record)
        num_cached = record.num_found * self.ledger.block_size
        self.actions.run(record, record.machine.on_submit(submit.peer.epoch))
        if record.machine.state in OVER:
            self.ledger.unpin(record)
        elif not self.ledger.has_room_for(record.num_tokens + 1):  # with its first token's KV
            record.reason = outcomes.TOO_LARGE
            self.actions.run(record, record.machine.on(E.DEADLINE))
        self.line.settle(record)
        return num_cached

    def fetch(
        self,
        key: AttemptKey,
        source: PeerRef,
        most_blocks: int,
        deadline: float,
        now: float,
        into: Sequence[int] = (),
        is_held: bool = False,
        first_block: int = 0,
    ) -> None:
        """Expects `source` to claim up to `most_blocks` whole blocks, which this node is about to ask it for. Ends in
        Fetched or NotFetched; no later than at `deadline`, unless cancelled. `into`: they are to come into these
        blocks, of which the hand-off gets references of its own, and are used while they come: bytes that differ end
        it, since sending them again would be too late. `is_held`: nothing is granted before `let_in`. `first_block`:
        which block of the prompt they begin with."""
        self.ledger.at(now)
        record = self.ledger.open(key)
        record.source_id, record.deadline, record.expected_at = source.node_id, deadline, now
        record.kind, record.most_blocks, record.is_held = HandoffKind.PULL, most_blocks, is_held
        record.pulled_from = first_block
        self.ledger.pool.touch(into)
        record.into, record.is_used_early = list(into), bool(into)
        self.line.take_claimed(record)
        self.actions.run(record, record.machine.on_submit(source.epoch))
        if record.machine.state in OVER:
            self.ledger.unpin(record)
        elif record.num_claimed and not record.num_tokens:  # its claim came first, and is of another size
            record.reason = outcomes.OTHER_LAYOUT
            self.actions.run(record, record.machine.on(E.DEADLINE))
        self.line.settle(record)

    def has_claimed(self, key: AttemptKey) -> bool:
        """Whether the source has claimed what it was asked for, and neither side has given up."""
        return self.ledger.records[key].machine.state in (S.QUEUED, *_UNDER_WAY)

    def let_in(self, key: AttemptKey, now: float) -> None:
        """Grants what was claimed and held."""
        self.ledger.at(now)
        record = self.ledger.records[key]
        record.is_held = False
        self.line.settle(record)

    def grant_of(self, key: AttemptKey) -> KVGrant | None:
        """The grant under which the source may be writing now; None: it may not."""
        record = self.ledger.records.get(key)
        return record.grant if record is not None and record.machine.state in _UNDER_WAY else None

    def is_unanswered(self, key: AttemptKey) -> bool:
        """Whether the source has sent nothing yet in this hand-off."""
        record = self.ledger.records.get(key)
        return record is not None and record.machine.state is S.EXPECTING

    def cancel(self, key: AttemptKey, now: float) -> None:
        self.ledger.at(now)
        record = self.ledger.records.get(key)
        if record is not None:
            record.because(outcomes.CANCELLED)
            self.actions.run(record, record.machine.on(E.CANCEL))
            self.line.settle(record)

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def drop_foreign(self) -> None:
        """Counts a hand-off message of a peer that can't be a source: its loss would fence nothing that it was
        granted."""
        self.counters.foreign_messages += 1

    def on_message(self, sender: NodeKey, message: Message, now: float) -> None:
        """Takes a source's message; one that speaks for another node or epoch than its connection is dropped."""
        self.ledger.at(now)
        if not isinstance(message, KVClaim | KVReady | KVRelease | KVDrained):
            self.counters.foreign_messages += 1
            return
        known = self.ledger.records.get(message.key)
        expected = known.source_id if known is not None and known.source_id else sender.node_id
        if sender != (expected, message.source_epoch):
            self.counters.foreign_messages += 1
            return
        record = self.ledger.open(message.key)
        record.source_id = sender.node_id
        machine = record.machine
        if isinstance(message, KVClaim) and self.peers.is_lost(sender):
            self.counters.foreign_messages += 1  # no grant before it is greeted again: no fence to come would cover it
        elif isinstance(message, KVClaim):
            self.line.on_claim(record, message)
        elif isinstance(message, KVReady):
            self._on_ready(record, message)
        elif isinstance(message, KVRelease):
            record.because(message.reason)
            self.actions.run(record, machine.on_release(message.source_epoch))
        elif self._is_settled(message.grant_id):
            self.actions.run(record, machine.on_drained(message.source_epoch, message.grant_id))
        self.line.settle(record)

    def on_transfer_event(self, event: object, now: float) -> None:
        self.ledger.at(now)
        if isinstance(event, Fenced):
            self.peers.fenced(event.node)
        elif isinstance(event, Verified):
            record = self.ledger.records.get(event.key)
            if record is not None:
                self._on_verified(record, event)

    def on_tick(self, now: float) -> None:
        self.ledger.at(now)
        self.num_under_way = 0
        for record in list(self.ledger.live.values()):
            state = record.machine.state
            if state in ENDED:
                self.ledger.bury(record)
            elif state is not S.UNKNOWN:
                self._tick(record)
                self.num_under_way += record.machine.state in _UNDER_WAY
            elif now >= record.deadline:  # it was only asked for
                self.ledger.forget(record)
        self.ledger.forget_old_tombstones()
        self.line.age()
        self.line.grant_in_order()

    def _tick(self, record: SinkRecord) -> None:
        if record.machine.state in UNTIL_SAFE:
            self._warn_of_long_quarantine(record)
        elif self.ledger.now >= record.deadline:
            record.reason = outcomes.EARLY if record.machine.state is S.EARLY else outcomes.DEADLINE
            self.actions.run(record, record.machine.on(E.DEADLINE))
        if record.machine.state is S.EXPECTING and self.peers.has_stayed_away(record):
            record.reason = outcomes.SOURCE_LOST
            self.actions.run(record, record.machine.on_source_lost(record.machine.source_epoch))
        if self.ledger.now >= record.lease_until > 0 and record.machine.state in (S.GRANTED, S.RESENDING):
            record.reason = outcomes.LEASE
            self.actions.run(record, record.machine.on(E.LEASE))
        if record.machine.state in (S.RESENDING, S.QUARANTINED) and self.ledger.now >= record.resend_at:
            every = max(2 * record.resend_every_s, self._timeouts.resend_s)
            record.resend_every_s = min(every, MAX_RESEND_S)
            record.resend_at = self.ledger.now + record.resend_every_s
            self.actions.run(record, record.machine.on(E.TIMER))
        self.line.settle(record)

    # --- out ------------------------------------------------------------------------------------------------

    def drain_effects(self) -> list[SinkEffect]:
        """The effects decided on since the last call, in order."""
        effects = self.effects[:]
        self.effects.clear()
        return effects

    def check_integrity(self) -> None:
        self.ledger.check_integrity()
        self.actions.check_integrity()

    # --- inside ---------------------------------------------------------------------------------------------

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
        self.actions.run(record, actions)

    def _makes_sense(self, record: SinkRecord, ready: KVReady) -> bool:
        """Whether sequences can go on from this KVReady: its tokens are of this model, and of samples that were asked
        for."""
        named = [token.sample_index for token in ready.first_tokens]
        if record.request is not None and not set(named) <= set(record.request.sample_indices):
            return False
        continuation = ready.continuation
        tokens = [token.token_id for token in ready.first_tokens]
        if continuation is not None:
            tokens += continuation.token_ids
            if self.info.max_model_len and continuation.num_tokens >= self.info.max_model_len:
                return False
        searches = [token.candidates for token in ready.first_tokens if token.candidates is not None]
        if record.request is not None and bool(searches) != (record.request.prompt.sampling.beam_width > 0):
            return False
        if any(len(given.logprobs) != len(given.token_ids) for given in searches):
            return False
        tokens += [token_id for given in searches for token_id in given.token_ids]
        if len(set(named)) < len(named) or (self.info.vocab_size and max(tokens, default=0) >= self.info.vocab_size):
            return False
        is_right_kind = (record.kind is HandoffKind.SEQUENCE) == (continuation is not None)
        first_read = max(record.num_passed, record.first_window)
        if continuation is not None and first_read > self.ledger.pool.window.num_passed(continuation.num_tokens):
            return False
        return is_right_kind and record.fits(continuation, self.ledger.block_size)

    def _on_verified(self, record: SinkRecord, event: Verified) -> None:
        record.bad_indices = event.bad_indices
        if event.bad_indices:
            self.counters.digest_mismatches += 1
            record.reason = outcomes.RECOMPUTING
            if record.is_used_early:
                self.actions.run(record, record.machine.on(E.DEADLINE))
        self.actions.run(record, record.machine.on_verified(event.grant_id, event.round, not event.bad_indices))
        self.line.settle(record)

    def _warn_of_long_quarantine(self, record: SinkRecord) -> None:
        waited = self.ledger.now - record.quarantined_at
        if waited < self._timeouts.quarantine_warn_s or record.was_warned:
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
