"""Turns a plan into a step. From here on the step is certain: progress is booked, prompts fork, blocks are hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import PlannedRow, StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import (
    AdapterLoad,
    BlockAppend,
    ForkSlot,
    NewSlot,
    SampleRow,
    ScheduledRow,
    SchedulerOutput,
)


@dataclass(slots=True)
class StepBookings:
    """The requests whose rows and samples a step has: parallel to `rows` and `samples` of its output."""

    row_requests: list[Request] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    is_mixed: bool = False  # prompt work beside decodes
    num_prompt_tokens: int = 0
    prompts: list[tuple[Request, int]] = field(default_factory=list)  # with their tokens in the step
    may_wait: bool = False  # for other nodes: how long it takes says little of this one (docs/simulator.md#chunks)


class StepBuilder:
    """Builds one step. Each step has a builder of its own."""

    def __init__(self, state: SchedulerState, step_id: int) -> None:
        self._state = state
        self._step_id = step_id
        self._launched = StepBookings()
        self._rows: list[ScheduledRow] = []
        self._samples: list[SampleRow] = []
        self._new_slots: list[NewSlot] = []
        self._forks: list[ForkSlot] = []
        self._block_appends: list[BlockAppend] = []

    def build(self, plan: StepPlan) -> tuple[SchedulerOutput, StepBookings]:
        copies = self._state.kv.take_copies(self._step_id)
        for request, row in plan.rows.items():
            self._add_row(request, row)
        # After all rows: what is found by hash was computed by an earlier step, never by this one.
        for request in plan.rows:
            self._state.kv.register_full_blocks(request, self._step_id)
        index = 0
        for request, row in plan.rows.items():
            if request.num_computed_tokens == request.num_launched_tokens:
                self._sample(index, request)
            if row.drafts:
                self._check(index, request, row.drafts)
            index += 1 + len(row.drafts)
        output = SchedulerOutput(
            step_id=self._step_id,
            rows=tuple(self._rows),
            samples=tuple(self._samples),
            new_slots=tuple(self._new_slots),
            forks=tuple(self._forks),
            block_appends=tuple(self._block_appends),
            copies=copies,
            adapter_loads=tuple(AdapterLoad(*load) for load in self._state.queues.adapters.take_loads()),
        )
        return output, self._launched

    def _add_row(self, request: Request, row: PlannedRow) -> None:
        start = request.num_computed_tokens + row.num_skipped_tokens
        end = start + row.num_tokens
        if row.num_skipped_tokens:
            request.doubt()
        self._state.kv.check_writable(request, start, end + len(row.drafts))
        if row.is_new:
            request.has_stale_slot = False
            self._enter_slot(request)
            if self._state.connector is not None and request.prompt.mode == "prefill":
                connector = self._state.connector
                connector.update_state_after_alloc(request, list(request.block_ids), row.num_external_tokens)
        else:
            self._patch_table(request)
        request.num_table_blocks, request.num_table_passed = len(request.block_ids), request.num_passed_blocks
        wants_logprobs = request.needs_prompt_logprobs and start < request.num_prompt_tokens
        self._rows.append(ScheduledRow(request.slot, start, row.num_tokens, wants_logprobs))
        self._launched.row_requests.append(request)
        if row.drafts:
            self._rows += [ScheduledRow(request.slot, end + place, 1) for place in range(len(row.drafts))]
            self._launched.row_requests += [request] * len(row.drafts)
        request.newest_row_start = start
        request.num_computed_tokens = end  # what of the drafts is right is known when the step is read
        request.last_step = self._step_id

    def _patch_table(self, request: Request) -> None:
        """Brings the slot's block table up to date: most steps have nothing for most slots."""
        has_grown = request.num_table_blocks < len(request.block_ids)
        if not has_grown and request.num_table_passed == request.num_passed_blocks:
            return
        slot, pool = request.slot, self._state.pool
        tables = range(1, 1 + pool.windows.num_each)
        if has_grown:
            for i in range(request.num_table_blocks, len(request.block_ids)):
                block_id = request.block_ids[i]
                self._block_appends.append(BlockAppend(slot, i, block_id))
                if tables:
                    self._block_appends += map(BlockAppend, repeat(slot), repeat(i), pool.windows.of(block_id), tables)
        if request.num_table_passed < request.num_passed_blocks:
            passed = range(request.num_table_passed, request.num_passed_blocks)
            self._block_appends += [BlockAppend(slot, i, pool.null_block, t) for i in passed for t in tables or (0,)]

    def _enter_slot(self, request: Request) -> None:
        self._new_slots.append(
            NewSlot(
                slot=request.slot,
                token_ids=request.known_token_ids(),
                num_prompt_tokens=request.prompt.num_true_tokens,
                block_ids=tuple(request.block_ids),
                sampling=request.prompt.sampling,
                sample_index=request.sample_indices[0],
                media=request.prompt.media,
                adapter=request.adapter_slot,
                window_ids=self._state.kv.window_ids(request),
            )
        )

    # --- samples --------------------------------------------------------------------------------------------

    def _sample(self, row: int, request: Request) -> None:
        """Adds the samples that the row's last token predicts: one, or each of a prompt's samples."""
        position = request.num_launched_tokens
        if len(request.sample_indices) == 1:  # of every stream in every step
            self._add_sample(row, request, request.sample_indices[0], position)
            return
        if request.prompt.mode == "prefill":  # its samples go on elsewhere: no slot of their own
            for sample_index in request.sample_indices:
                self._add_sample(row, request, sample_index, position)
            return
        if request.beams is not None:  # what follows is known when the step is read
            self._add_sample(row, request, request.sample_indices[0], position)
            return
        others = request.sample_indices[1:]
        request.sample_indices = request.sample_indices[:1]
        for place, sample_index in enumerate(others):
            if not self._fork(row, request, sample_index, position):
                # No slot or block: the rest computes the prompt again, together, from what is cached by then.
                self._state.enqueue(self._state.make_child(request, others[place:]))
                break
        self._add_sample(row, request, request.sample_indices[0], position)

    def _fork(self, row: int, parent: Request, sample_index: int, position: int) -> bool:
        if not self._state.queues.free_slots:
            return False
        child = self._state.make_child(parent, (sample_index,))
        if not self._state.kv.fork(parent, child, position):
            return False
        self._state.fork_into_batch(child)
        child.num_computed_tokens = position
        child.num_table_blocks, child.num_table_passed = len(child.block_ids), child.num_passed_blocks
        child.last_step = self._step_id
        self._forks.append(
            ForkSlot(
                child.slot,
                parent.slot,
                position,
                tuple(child.block_ids),
                sample_index,
                self._state.kv.window_ids(child),
            )
        )
        self._add_sample(row, child, sample_index, position)
        return True

    def _check(self, row: int, request: Request, drafts: Sequence[int]) -> None:
        """Adds the samples behind drafts, in the rows behind this one. They are not in flight: perhaps none lands."""
        [sample_index], slot, position = request.sample_indices, request.slot, self._rows[row].start + 1
        output_index = position - request.prompt.num_true_tokens
        self._samples += [
            SampleRow(row + place, slot, position + place, sample_index, output_index + place, draft)
            for place, draft in enumerate(drafts, 1)
        ]
        self._launched.sampled += [request] * len(drafts)

    def _add_sample(self, row: int, request: Request, sample_index: int, position: int) -> None:
        output_index = position - request.prompt.num_true_tokens
        self._samples.append(SampleRow(row, request.slot, position, sample_index, output_index))
        self._launched.sampled.append(request)
        request.num_in_flight += 1
