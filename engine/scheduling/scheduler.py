"""One scheduler for every role: each request wants its computed tokens to reach its known tokens.

A step hands out a token budget: running decodes first, then prompt chunks: of running, then of waiting requests, each
in the order of (priority, arrival), or all in the order that `prompt_order` gives. It runs one step ahead of the
device: schedule(N+1) comes before update(N), so a launched sample counts as a token in flight whose value is not known
yet (docs/architecture.md, "The step loop").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

import msgspec

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import HELP_LOST, Candidates, FirstToken, TokenLogprobs
from tandem.engine.process.process_log import RateLimited
from tandem.engine.scheduling import stop
from tandem.engine.scheduling.beams.carriers import BeamCarriers
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.builder import StepBookings, StepBuilder
from tandem.engine.scheduling.planner import StepPlanner
from tandem.engine.scheduling.request import EngineEvent, PromptLogprobsEvent, Request, RequestState, TokensEvent
from tandem.engine.scheduling.speculation.lookups import LookedUpTokens
from tandem.engine.scheduling.speculation.options import PromptLookup, read_speculative_config
from tandem.engine.scheduling.speculation.speculator import Guesser, Speculator
from tandem.engine.scheduling.speculation.verdicts import Run, runs_of
from tandem.engine.scheduling.step import RunnerOutput, SampleRow, ScheduledRow, SchedulerOutput, WrittenSlots
from tandem.engine.scheduling.step_pace import StepPace
from tandem.engine.scheduling.work.reporter import WorkReporter

limited = RateLimited(logging.getLogger(__name__))
OnPrompts = Callable[[Sequence[tuple[AttemptKey, int]], float], None]


class Scheduler:
    """Verbs of the step loop: `schedule`, then `update` with what the runner answered, in the order of steps.

    Requests come by `add` and `add_committed` of its `state` and go by their last token, `abort` or a FailedEvent.
    """

    def __init__(
        self,
        state: SchedulerState,
        on_prompts: OnPrompts = lambda prompts, seconds: None,
        guesser: Guesser | None = None,
    ) -> None:
        """`on_prompts` is told of the parts of prompts in a step, and of its seconds, when it has ended. `guesser`
        None: prompt lookup where the options ask for it, else nothing is guessed."""
        self.state, self._on_prompts = state, on_prompts
        self.beams = BeamCarriers(state)
        self.pace = StepPace(state.clock)
        self._planner = StepPlanner(state)
        asked = read_speculative_config(state.options.speculative_config)
        if guesser is None and isinstance(asked, PromptLookup):
            guesser = LookedUpTokens(asked)
        self.speculator = None if guesser is None else Speculator(guesser, state, lambda: self.pace.lead_s)
        self.work = WorkReporter(state, self._planner.prompt_s_per_token)
        self._launched: dict[int, StepBookings] = {}
        self._withheld: list[tuple[Request, Callable[[], None]]] = []  # in order
        self._next_step = 0

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can be launched now. A step that is returned must be executed."""
        self.pace.decided()
        self._take_withheld()
        plan = self._planner.plan(nothing_in_flight=not self._launched)
        if not plan.rows:
            return None
        if self.speculator is not None:
            self.pace.guessed(self.speculator.add_drafts(plan))
        step_id = self._next_step
        self._next_step += 1
        output, launched = StepBuilder(self.state, step_id).build(plan)
        self._launched[step_id] = launched
        prompts = [(request, row.num_tokens) for request, row in plan.rows.items() if row.is_prompt]
        launched.is_mixed, launched.prompts = 0 < len(prompts) < len(plan.rows), prompts
        launched.num_prompt_tokens = sum(num for _, num in prompts)
        launched.may_wait = any(request.has_help for request, _ in prompts)
        self.state.prompt_order.launched(prompts)
        self.state.clock.launched(step_id, output.num_tokens, launched.num_prompt_tokens)
        meta = None if self.state.connector is None else self.state.connector.build_connector_meta(output)
        meta = self.state.shares.step_meta(step_id, self.state.tiers.step_meta(step_id, meta))
        return output if meta is None else msgspec.structs.replace(output, connector_meta=meta)

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._next_step

    @property
    def num_speculative_tokens(self) -> int:
        """How many tokens may be guessed ahead of a sequence; 0: none."""
        return 0 if self.speculator is None else self.speculator.num_speculative_tokens

    @property
    def spec_counters(self) -> dict[str, float]:
        """What became of guessed tokens so far; {}: none are guessed."""
        return {} if self.speculator is None else {name: float(n) for name, n in self.speculator.counters.items()}

    @property
    def prompt_s_per_token(self) -> float:
        """Seconds that a token of a prompt that comes now would take; 0: not known."""
        return self._planner.prompt_s_per_token()

    def update(self, output: SchedulerOutput, result: RunnerOutput) -> list[EngineEvent]:
        """Takes in what step `output` made, and returns all events since the last call. Tokens of requests that have
        ended meanwhile are dropped."""
        self._take_withheld()  # those of a request that is trusted since then come before its tokens of this step
        launched = self._launched.pop(output.step_id)
        seconds = self.state.clock.completed(output.step_id, launched.may_wait)
        token_ids = result.token_ids.tolist()
        runs = self._judge(output, launched, token_ids if result.failure is None else [])
        self.work.observed(output, launched.num_prompt_tokens, seconds, launched.may_wait)
        if self.state.step_times.are_measured and launched.is_mixed and not launched.may_wait:
            self.state.step_times.observed(output.num_tokens, seconds)
        if result.failure is not None:
            return self._give_up(output, launched, result.failure)
        if launched.prompts:
            self._on_prompts([(request.key, num) for request, num in launched.prompts], seconds)
        if launched.prompts or result.failed_slots or result.spoiled_slots:
            self._take_rows(output, launched, result)
        samples, sampled = output.samples, launched.sampled
        each: Iterable[tuple[int, tuple[SampleRow, Request, tuple[int, ...]]]]
        if runs:
            each = [(first, (samples[first], sampled[first], tuple(token_ids[first:kept]))) for first, kept, _ in runs]
        else:
            each = enumerate(zip(samples, sampled, zip(token_ids, strict=True), strict=True))
        for index, (sample, request, drawn) in each:
            if request.is_doubtful:
                self._withheld.append((request, partial(self._take, request, sample, drawn, result, index)))
            else:
                self._take(request, sample, drawn, result, index)
        return self.state.take_events()

    def _judge(self, output: SchedulerOutput, launched: StepBookings, token_ids: list[int]) -> list[Run]:
        """Finds which samples of a step with drafts stand behind their sequence's own tokens, and tells the guesser how
        its drafts fared. `token_ids` []: nothing was computed."""
        if self.speculator is None:
            return []
        runs, num_accepted = [], 0
        if token_ids and output.has_drafts:
            runs = runs_of(self.speculator.drafts_of(output.samples, launched.sampled), token_ids)
            for first, kept, end in runs:
                if end - first > 1:
                    self.speculator.learn(launched.sampled[first], end - first - 1, kept - first - 1)
                    num_accepted += kept - first - 1
        self.speculator.completed(num_accepted)
        return runs

    def _take_withheld(self) -> None:
        """Takes in the tokens of requests whose KV has been verified meanwhile, and drops those of others that ended.
        Until then they count as in flight."""
        withheld, self._withheld = self._withheld, []
        for request, take in withheld:
            if request.is_doubtful and request.state is not RequestState.FINISHED:
                self._withheld.append((request, take))
            else:
                take()

    def _take(
        self, request: Request, sample: SampleRow, token_ids: tuple[int, ...], result: RunnerOutput, index: int
    ) -> None:
        """Takes in what sample number `index` of a step drew, and the samples behind its drafts that were right."""
        request.num_in_flight -= 1
        is_wanted = request.beams is not None or sample.sample_index in request.sample_indices
        if request.state is RequestState.FINISHED or not is_wanted:
            return
        if index in result.misled:
            self.state.fail(request, "invalid_request", result.misled[index])
            return
        try:
            if index in result.candidates:
                self._take_candidates(request, sample, token_ids[0], result.candidates[index])
            else:
                self._take_tokens(request, sample, token_ids, result, index)
        except Exception:
            text, name = "request %s attempt %d failed at a token", request.key
            limited.exception(text, *name, key="token", request_id=name.request_id)
            self.state.give_up(request, "the node can't take this request's token in; its log says why")

    def written_by(self, output: SchedulerOutput) -> list[WrittenSlots]:
        """The slots of blocks that a launched step wrote and that somebody may still find: by hash, or as a request
        that is in the step."""
        pool, block_size = self.state.pool, self.state.block_size
        written = [WrittenSlots(block_id, 0, block_size) for block_id in pool.filled_from(output.step_id)]
        drafted = output.drafted_rows
        for place, (row, request) in enumerate(
            zip(output.rows, self._launched[output.step_id].row_requests, strict=True)
        ):
            end = row.start + row.num_tokens
            if place not in drafted or not request.block_ids:
                end = min(end, request.num_computed_tokens)
            for index in range(row.start // block_size, -(-end // block_size)):
                first = index * block_size
                slots = max(row.start - first, 0), min(end - first, block_size)
                written.append(WrittenSlots(request.block_ids[index], *slots))
        return written

    def fail_overflowed(self, output: SchedulerOutput, saturated: frozenset[int]) -> None:
        """Fails requests whose KV in a launched step had to saturate, before anything of that step is told: who holds
        one of the blocks `saturated`, and, of unknown blocks, who has lost them since."""
        drafted, own = output.drafted_rows, self._launched[output.step_id].row_requests
        rows = [each for place, each in enumerate(zip(output.rows, own, strict=True)) if place not in drafted]
        lost = [request for row, request in rows if request.num_computed_tokens < row.start + row.num_tokens]
        self.state.fail_overflowed(lost, saturated)

    def _give_up(self, output: SchedulerOutput, launched: StepBookings, reason: str) -> list[EngineEvent]:
        """Fails every request that has blocks, since a step was not computed: each may have found its prefix in that
        step's blocks, or be in the step that was launched meanwhile. Another node may have the memory for them."""
        for request, sample in zip(launched.sampled, output.samples, strict=True):
            request.num_in_flight -= sample.draft < 0
        self.state.fail_holders("out_of_memory", reason)
        return self.state.take_events()

    def assert_empty(self) -> None:
        self.state.assert_empty()
        assert not self._launched, "a launched step was not read"
        assert not any(request.is_doubtful for request, _ in self._withheld), "who is gone keeps tokens"

    # --- results --------------------------------------------------------------------------------------------

    def _take_rows(self, output: SchedulerOutput, launched: StepBookings, result: RunnerOutput) -> None:
        """Fails whom the runner could not compute, and takes what it says of prompts."""
        for index, (row, request) in enumerate(zip(output.rows, launched.row_requests, strict=True)):
            if row.slot in result.failed_slots and request.state is not RequestState.FINISHED:
                self.state.give_up(request, result.failed_slots[row.slot])
            elif row.slot in result.spoiled_slots and request.state is not RequestState.FINISHED:
                self.state.fail(request, HELP_LOST, result.spoiled_slots[row.slot], retryable=True)
            if row.prompt_logprobs:
                self._take_prompt_logprobs(request, row, result.prompt_logprobs.get(index, []))

    def _take_prompt_logprobs(self, request: Request, row: ScheduledRow, entries: list[TokenLogprobs]) -> None:
        """Keeps entries by position, since a prompt that was preempted and computed again reports some twice."""
        if request.state is RequestState.FINISHED or request.prompt_logprobs_sent:
            return
        request.prompt_logprobs.update(enumerate(entries, row.start + 1))
        if row.start + row.num_tokens >= request.num_prompt_tokens:
            in_order = tuple(entry for _, entry in sorted(request.prompt_logprobs.items()))
            self.state.events.append(PromptLogprobsEvent(request, in_order))
            request.prompt_logprobs.clear()
            request.prompt_logprobs_sent = True

    def _take_tokens(
        self, request: Request, sample: SampleRow, token_ids: tuple[int, ...], result: RunnerOutput, index: int
    ) -> None:
        """Takes in as many of these tokens as come before the sequence's end, and tells of them at once."""
        misled = None
        if result.misled and (misled := _place_of(result.misled, index, len(token_ids))) is not None:
            token_ids = token_ids[:misled]
        num_kept, reason, eos = 0, None, self.state.eos_token_ids
        for token_id in token_ids:
            output_index, num_kept = sample.output_index + num_kept, num_kept + 1
            reason = stop.finish_reason(request, token_id, output_index, sample.position + num_kept, eos)
            if reason is not None:
                break
        stop_token_id = token_ids[num_kept - 1] if reason == "stop" else None
        if result.ended and (place := _place_of(result.ended, index, num_kept)) is not None:
            stop_token_id = stop_token_id if place == num_kept - 1 else None
            num_kept, reason = place + 1, "stop"
        if num_kept < len(token_ids):
            token_ids = token_ids[:num_kept]
        entries = None
        if result.logprobs:
            logprobs = result.logprobs[index : index + num_kept]
            entries = tuple([entry for entry in logprobs if entry is not None]) or None
        event = TokensEvent(
            request, sample.sample_index, sample.output_index, token_ids, reason, stop_token_id, entries
        )
        self.state.events.append(event)
        if request.prompt.mode == "prefill":
            self._take_first(request, FirstToken(sample.sample_index, token_ids[0], reason is not None))
            return
        request.output_token_ids.extend(token_ids)
        request.first_token_at = request.first_token_at or self.state.clock.now()
        if request.block_ids:
            if num_kept > 1:  # the KV of drafts that were right is that of these tokens
                request.num_computed_tokens += num_kept - 1
            self.state.kv.register_full_blocks(request, request.last_step)
        if reason is not None:
            self.state.finish(request)
        elif misled is not None:
            self.state.fail(request, "invalid_request", result.misled[index + misled])

    def _take_candidates(self, request: Request, sample: SampleRow, token_id: int, candidates: Candidates) -> None:
        """Takes what may follow a beam. A prompt that is handed off leaves the choice to its sink."""
        if request.prompt.mode != "prefill":
            self.beams.take(request, candidates, token_id)
            return
        self._take_first(
            request, FirstToken(sample.sample_index, token_id, False, None if request.first_tokens else candidates)
        )

    def _take_first(self, request: Request, token: FirstToken) -> None:
        request.first_tokens.append(token)
        if len(request.first_tokens) == len(request.sample_indices):
            self.state.kv.register_full_blocks(request, request.last_step)  # if it was doubtful when it was launched
            self.state.finish(request)


def _place_of(named: Container[int], index: int, count: int) -> int | None:
    """Which of the `count` samples from `index` on is the first that is named; None: none is."""
    return next((place for place in range(count) if index + place in named), None)
