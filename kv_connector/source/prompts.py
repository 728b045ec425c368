"""Prompts that are pushed while they are computed: when they claim, which may start without a grant, what each step
pushes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.blocks.reservations import Kind
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.jobs import StepMoves
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.peers import SourcePeers
from tandem.kv_connector.source.record import OVER

_AWAITS_GRANT = (S.CLAIMING, S.PARKED)


class PushedPrompts:
    """The scheduler half of the connector for prompts. Implements KVConnectorScheduler (engine/scheduling/ports.py)."""

    def __init__(
        self, ledger: SourceLedger, actions: SourceActions, peers: SourcePeers, max_parked: int, whole_up_to: int
    ) -> None:
        """`max_parked`: how many blocks prompts without a grant may hold. `whole_up_to`: rows of up to so many tokens
        are pushed whole behind their step, which may then be a graph's: launching it and its pushes layer by layer
        takes the host longer than these bytes take."""
        self._ledger, self._actions, self._peers = ledger, actions, peers
        self._max_parked, self._whole_up_to = max_parked, whole_up_to

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        record = self._ledger.records.get(request.key)
        if record is None or not self._peers.knows(record.peer):
            return None
        record.request = request
        self._ledger.book(record)
        reservations = self._ledger.pool.reservations
        if record.machine.state is S.IDLE and reservations.may_claim(record.num_blocks):
            self._peers.note_block_sizes(record)
            self._actions.run(record, record.machine.on(E.CLAIM))
        state = record.machine.state
        if state is S.CLAIMING:
            assert record.hold is not None, "it has claimed"
            if not reservations.may_park(record.hold, self._max_parked):
                return None
            self._ledger.book_as(record, Kind.PARKED)  # now: others of this step, which has not begun yet, count it
            return 0
        return 0 if state in (S.PARKED, S.PUSHING) else None

    def is_granted(self, request: Request) -> bool:
        record = self._ledger.records.get(request.key)
        return record is not None and record.machine.state is S.PUSHING

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        record = self._ledger.records.get(request.key)
        if record is None:
            return  # a share of another node's prompt
        first = not record.block_ids
        record.blocks_allocated(block_ids, request.num_computed_tokens)
        if first:
            self._actions.run(record, record.machine.on(E.START))

    def build_connector_meta(self, output: SchedulerOutput) -> StepMoves | None:
        by_slot = {
            record.request.slot: record
            for record in self._ledger.records.values()
            if record.request is not None and record.request.slot >= 0 and record.block_ids
        }
        pushes, whole, awaits_grant, by_layer = [], [], False, False
        for row in output.rows:
            record = by_slot.get(row.slot)
            if record is None:
                continue
            pushing = record.machine.state is S.PUSHING
            awaits_grant |= record.machine.state in _AWAITS_GRANT
            # What comes from a peer while the step runs is awaited layer by layer as its own blocks are.
            goes_ahead = pushing and record.request is not None and not record.request.has_help
            before = record.take_whole_push(row.start, record.last_step) if goes_ahead else None
            whole += [before] if before is not None else []
            record.step_built(output.step_id, row.start + row.num_tokens)
            is_small = row.num_tokens <= self._whole_up_to
            by_layer |= not is_small
            if pushing and is_small:
                behind = record.take_whole_push(record.num_computed_tokens, output.step_id)
                whole += [behind] if behind is not None else []
            elif pushing:
                pushes += record.take_layer_pushes()
        if not pushes and not whole and not awaits_grant:
            return None
        return StepMoves(output.step_id, tuple(pushes), tuple(whole), by_layer=by_layer)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        record = self._ledger.records.get(request.key)
        if record is None or record.machine.state in OVER:
            return False
        record.request = None
        record.block_ids, record.owns_blocks = list(block_ids), True
        if len(request.first_tokens) < len(request.sample_indices):  # aborted or failed
            record.reason = record.reason or outcomes.CANCELLED
            self._actions.run(record, record.machine.on(E.CANCEL))
        else:
            record.first_tokens = tuple(request.first_tokens)
            ended = all(token.finished for token in record.first_tokens)
            record.reason = outcomes.FINISHED if ended else ""
            self._actions.run(record, record.machine.on(E.ALL_FINISHED if ended else E.COMPUTED))
        return True
