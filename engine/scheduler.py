"""One scheduler for every role: each request wants its computed tokens to reach its known tokens.

A step hands out a token budget: running decodes first, then prompt chunks of running, then of waiting requests, in
the order of (priority, arrival). It runs one step ahead of the device: schedule(N+1) comes before update(N), so a
launched sample counts as a token in flight whose value is not known yet (docs/architecture.md, "The step loop").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tandem.engine.messages import FinishReason
from tandem.engine.request import EngineEvent, PromptLogprobsEvent, Request, RequestState, TokenEvent
from tandem.engine.scheduler_state import SchedulerState, known_tokens, queue_order
from tandem.engine.step import (
    BlockAppend,
    ForkSlot,
    NewSlot,
    RunnerOutput,
    SampleRow,
    ScheduledRow,
    SchedulerOutput,
)


@dataclass(slots=True)
class _Step:
    """A step being put together. `sampled` runs parallel to `samples`."""

    step_id: int
    budget: int
    prompt_budget: int
    rows: list[ScheduledRow] = field(default_factory=list)
    row_requests: list[tuple[Request, int]] = field(default_factory=list)  # with its num_preemptions then
    samples: list[SampleRow] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    new_slots: list[NewSlot] = field(default_factory=list)
    forks: list[ForkSlot] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)  # id() of requests with a row
    preempted: bool = False


class Scheduler(SchedulerState):
    """Verbs of the step loop: `schedule`, then `update` with what the runner answered, in the order of steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launched: dict[int, _Step] = {}

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can be launched now."""
        step = _Step(self._next_step, self.options.max_num_batched_tokens, self.options.max_num_batched_tokens)
        copies = self._take_copies(step.step_id) if self._pending_copies else ()
        for request in [r for r in self.running if self._is_decoding(r)]:
            if request.state is RequestState.RUNNING:
                self._schedule_decode(step, request)
        if self.limits_prompt_work and self.options.decode_prompt_budget and step.rows:
            step.prompt_budget = self.options.decode_prompt_budget
        for request in [r for r in self.running if not self._is_decoding(r)]:
            if request.state is RequestState.RUNNING and id(request) not in step.scheduled:
                self._schedule_chunk(step, request)
        if not step.preempted:
            self._admit(step)
        if not step.rows and not copies:
            return None
        self._next_step += 1
        output = SchedulerOutput(
            step_id=step.step_id,
            rows=tuple(step.rows),
            samples=tuple(step.samples),
            new_slots=tuple(step.new_slots),
            forks=tuple(step.forks),
            block_appends=tuple(step.block_appends),
            copies=copies,
        )
        self._launched[step.step_id] = step
        if self.connector is not None:
            output = replace(output, connector_meta=self.connector.build_connector_meta(output))
        return output

    def update(self, output: SchedulerOutput, result: RunnerOutput) -> list[EngineEvent]:
        """Takes in what step `output` made. Tokens of requests that have ended meanwhile are dropped."""
        step = self._launched.pop(output.step_id)
        self._collect_prompt_logprobs(step, result)
        logprobs = result.logprobs or [None] * len(step.samples)
        for sample, request, token, entry in zip(step.samples, step.sampled, result.token_ids, logprobs, strict=True):
            request.num_in_flight -= 1
            if request.state is RequestState.FINISHED or sample.sample_index not in request.sample_indices:
                continue
            self._take_token(request, sample, int(token), entry)
        return self.take_events()

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    # --- scheduling -----------------------------------------------------------------------------------------

    def _is_decoding(self, request: Request) -> bool:
        """All computed but its newest token. A sequence that recomputes its output is prompt work."""
        todo = self._num_launched_tokens(request) - request.num_computed_tokens
        return todo <= 1 and request.num_computed_tokens >= request.num_prompt_tokens

    def _num_launched_tokens(self, request: Request) -> int:
        """Tokens known to the device once the launched steps have run."""
        return request.num_tokens + request.num_in_flight

    def _has_its_last_token(self, request: Request) -> bool:
        """Predicted: the tokens in flight bring it to its limit, no further row may be launched."""
        outputs = request.num_prior_output_tokens + len(request.output_token_ids) + request.num_in_flight
        return outputs >= request.sampling.max_tokens or self._num_launched_tokens(request) >= self.max_model_len

    def _schedule_decode(self, step: _Step, request: Request) -> None:
        todo = self._num_launched_tokens(request) - request.num_computed_tokens
        if todo < 1 or step.budget < todo or self._has_its_last_token(request):
            return
        if self._make_room(step, request, request.num_computed_tokens + todo):
            self._add_row(step, request, todo)

    def _schedule_chunk(self, step: _Step, request: Request) -> None:
        todo = self._chunk(step, request)
        if todo and self._make_room(step, request, request.num_computed_tokens + todo):
            self._add_row(step, request, todo)

    def _chunk(self, step: _Step, request: Request) -> int:
        """Tokens of the next chunk: within budget and chunk limit, ending on a block boundary unless it is the last."""
        todo = self._num_launched_tokens(request) - request.num_computed_tokens
        limit = min(step.budget, step.prompt_budget, self.options.max_prefill_chunk or todo)
        if todo <= limit:
            return todo
        end = (request.num_computed_tokens + limit) // self.block_size * self.block_size
        aligned = end - request.num_computed_tokens
        return aligned if aligned > 0 else max(limit, 0)

    def _make_room(self, step: _Step, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a running request, by preempting others or, in the end, itself."""
        while (new := self._grow(request, num_tokens)) is None:
            if self.blocks_for(num_tokens) > self.pool.num_blocks:
                text = f"the sequence outgrew the pool of {self.pool.num_blocks} KV blocks"
                self._fail(request, "too_large_for_pool", text, retryable=False)
                step.preempted = True
                return False
            victim = self._victim(step, request)
            self._preempt(victim)
            step.preempted = True
            if victim is request:
                return False
        first = len(request.block_ids)
        request.block_ids += new
        step.block_appends += [BlockAppend(request.slot, first + i, block) for i, block in enumerate(new)]
        if new:
            self._tell_connector(request, 0)
        return True

    def _victim(self, step: _Step, request: Request) -> Request:
        """Least important: committed KV that has no slot yet, then running requests without a row in this step."""
        holders = [r for r in self.waiting if r.block_ids]
        idle = [r for r in self.running if id(r) not in step.scheduled]
        for candidates in (holders, idle):
            last = max(candidates, key=queue_order, default=None)
            if last is not None and (last is request or queue_order(last) > queue_order(request)):
                return last
        return request

    def _admit(self, step: _Step) -> None:
        """Starts waiting requests while budget, slots and blocks last. One that must wait for its connector or for
        its own tokens in flight is passed by; one that lacks blocks holds the line for all but those that hold KV."""
        blocked = False
        for request in list(self.waiting):
            if not self._free_slots or min(step.budget, step.prompt_budget) < 1:
                return
            if request.num_in_flight or (blocked and not request.block_ids):
                continue
            if not self._start(step, request):
                blocked = True
        holders = [request for request in self.waiting if request.block_ids]
        if blocked and holders and not self.running:  # nobody will free a block: the least important starts over
            self._preempt(max(holders, key=queue_order))

    def _start(self, step: _Step, request: Request) -> bool:
        """Whether the requests behind it may be tried."""
        fresh = not request.block_ids
        hits = self._prefix_hits(request) if fresh else []
        num_computed = len(hits) * self.block_size if fresh else request.num_computed_tokens
        external = self._ask_connector(request, num_computed)
        if external is None:
            return True
        held = hits if fresh else request.block_ids
        missing = self.blocks_for(request.num_tokens) - len(held)
        if missing > self.pool.num_free - self.pool.num_unused(hits):
            return False
        if fresh:
            self.pool.touch(hits)
            request.block_ids = list(hits)
            request.num_registered_blocks = len(hits)
            if request.num_cached_tokens == 0 and request.state is RequestState.WAITING:
                request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        request.num_computed_tokens = num_computed
        todo = self._chunk(step, request)
        new = self._grow(request, num_computed + todo)
        assert new is not None, "room was checked"
        request.block_ids += new
        self._enter_batch(step, request)
        self._tell_connector(request, external)
        self._add_row(step, request, todo)
        return True

    def _prefix_hits(self, request: Request) -> list[int]:
        """Cached blocks, ending below the last token: at least one is computed, for its logits."""
        wants_logprobs = request.sampling.num_prompt_logprobs is not None and not request.prompt_logprobs_sent
        if not self.pool.enable_caching or not request.use_prefix_cache or wants_logprobs:
            return []
        return self.pool.match_prefix(request.block_hashes[: (request.num_tokens - 1) // self.block_size])

    def _ask_connector(self, request: Request, num_computed: int) -> int | None:
        if self.connector is None or request.mode != "prefill":
            return 0
        return self.connector.get_num_new_matched_tokens(request, num_computed)

    def _tell_connector(self, request: Request, num_external: int) -> None:
        if self.connector is not None and request.mode == "prefill":
            self.connector.update_state_after_alloc(request, request.block_ids, num_external)

    def _enter_batch(self, step: _Step, request: Request) -> None:
        self.waiting.remove(request)
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        self.running.append(request)
        self.running.sort(key=queue_order)
        step.new_slots.append(
            NewSlot(
                slot=request.slot,
                token_ids=known_tokens(request),
                num_prompt_tokens=request.num_prompt_tokens - request.num_prior_output_tokens,
                block_ids=tuple(request.block_ids),
                sampling=request.sampling,
                sample_index=request.sample_indices[0],
            )
        )

    def _add_row(self, step: _Step, request: Request, num_tokens: int) -> None:
        wants_logprobs = request.sampling.num_prompt_logprobs is not None and not request.prompt_logprobs_sent
        row = ScheduledRow(request.slot, request.num_computed_tokens, num_tokens, wants_logprobs)
        step.rows.append(row)
        step.row_requests.append((request, request.num_preemptions))
        step.scheduled.add(id(request))
        step.budget -= num_tokens
        if not self._is_decoding(request):
            step.prompt_budget -= num_tokens
        request.num_computed_tokens += num_tokens
        request.last_step = step.step_id
        self._register_blocks(request, step.step_id)
        if request.num_computed_tokens == self._num_launched_tokens(request):
            self._add_samples(step, request)

    def _add_samples(self, step: _Step, request: Request) -> None:
        """The row's last token predicts the next: one sample, or one for each of a prompt's samples."""
        row, total = len(step.rows) - 1, self._num_launched_tokens(request)
        output_index = total - (request.num_prompt_tokens - request.num_prior_output_tokens)
        samples, forking = request.sample_indices, request.mode != "prefill"
        if forking:
            request.sample_indices = samples[:1]
        for sample_index in samples:
            owner: Request | None = request
            if forking and sample_index != samples[0]:
                owner = self._fork(step, request, sample_index, total)
            if owner is not None:
                step.samples.append(SampleRow(row, owner.slot, total, sample_index, output_index))
                step.sampled.append(owner)
                owner.num_in_flight += 1

    def _fork(self, step: _Step, parent: Request, sample_index: int, total: int) -> Request | None:
        """A child in the batch beside its parent; None: no slot or block, it will compute its prompt by itself."""
        child = self._make_child(parent, sample_index)
        # A slot that lost its request in this very step may still have a row in it.
        if step.preempted or not self._free_slots or not self._share_blocks(parent, child, total):
            self._enqueue(child)
            return None
        child.num_computed_tokens = total
        child.num_registered_blocks = total // self.block_size
        child.state = RequestState.RUNNING
        child.slot = self._free_slots.pop()
        self.running.append(child)
        self.running.sort(key=queue_order)
        step.scheduled.add(id(child))
        step.forks.append(ForkSlot(child.slot, parent.slot, total, tuple(child.block_ids), sample_index))
        return child

    # --- results --------------------------------------------------------------------------------------------

    def _collect_prompt_logprobs(self, step: _Step, result: RunnerOutput) -> None:
        for row, (request, num_preemptions) in enumerate(step.row_requests):
            stale = request.state is RequestState.FINISHED or request.num_preemptions != num_preemptions
            if stale or not step.rows[row].prompt_logprobs:
                continue
            request.prompt_logprobs += result.prompt_logprobs.get(row, [])
            wanted = request.num_prompt_tokens - request.num_prior_output_tokens - 1
            if not request.prompt_logprobs_sent and len(request.prompt_logprobs) >= wanted:
                request.prompt_logprobs_sent = True
                self._events.append(PromptLogprobsEvent(request, tuple(request.prompt_logprobs[:wanted])))

    def _take_token(self, request: Request, sample: SampleRow, token: int, logprobs: object) -> None:
        reason, stop_token = self._ends_with(request, token, sample.output_index)
        event = TokenEvent(request, sample.sample_index, sample.output_index, token, reason, stop_token, logprobs)  # type: ignore[arg-type]
        self._events.append(event)
        if request.mode == "prefill":
            request.first_tokens.append((sample.sample_index, token, reason is not None))
            if len(request.first_tokens) >= len(request.sample_indices):
                self._finish(request)
            return
        request.output_token_ids.append(token)
        if request.block_ids:
            self._register_blocks(request, request.last_step)
        if reason is not None:
            self._finish(request)

    def _ends_with(self, request: Request, token: int, output_index: int) -> tuple[FinishReason | None, int | None]:
        """Why the sample ends with this token, the stop token if it is one; `output_index` counts from 0."""
        sampling, num_outputs = request.sampling, output_index + 1
        if num_outputs > sampling.min_tokens:
            is_eos = token in self.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return "stop", token
        if num_outputs >= sampling.max_tokens:
            return "length", None
        length = request.num_prompt_tokens - request.num_prior_output_tokens + num_outputs
        return ("length", None) if length >= self.max_model_len else (None, None)
