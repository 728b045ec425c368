"""Gives the decode rows of a planned step drafts, and learns what became of them (docs/speculation.md).

A step with drafts is read before the next is decided, since nobody knows before where its sequences stand. Behind any
other step the next is decided while its tokens are in flight: then a sequence's drafts are those that follow the guess
for that token, too.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.lengths import Acceptance, num_worthwhile
from tandem.engine.scheduling.speculation.options import PromptLookup
from tandem.engine.scheduling.speculation.token_index import TokenIndex


class GuessedSequence:
    """What guessing knows of one sequence."""

    __slots__ = ("acceptance", "index")

    def __init__(self, request: Request, options: PromptLookup) -> None:
        self.index = TokenIndex(request.prompt.token_ids, options.prompt_lookup_min, options.prompt_lookup_max)
        self.acceptance = Acceptance()

    def guesses(self, request: Request, count: int) -> list[int]:
        """Tokens that may follow those that the host knows."""
        self.index.extend(request.output_token_ids[len(self.index) - request.num_prompt_tokens :])
        return self.index.continuation(count)


class Speculator:
    """The guesses of one scheduler. `counters` count sequences that had drafts in a step, their drafts, and those that
    were right."""

    def __init__(self, options: PromptLookup, state: SchedulerState, stall_s: Callable[[], float]) -> None:
        """`stall_s`: how long the device waits for the host where a step must be read before the next is decided."""
        self._options, self._state, self._stall_s = options, state, stall_s
        self._sequences: dict[Request, GuessedSequence] = {}
        self.counters = {"spec_drafts": 0, "spec_draft_tokens": 0, "spec_accepted_tokens": 0}

    @property
    def num_speculative_tokens(self) -> int:
        return self._options.num_speculative_tokens

    def add_drafts(self, plan: StepPlan) -> None:
        """Puts drafts into rows of the plan, as many as pay. They take no block: beyond its last one a sequence has
        none."""
        self._forget_ended()
        if plan.preempted:
            return
        streams = [request for request, row in plan.rows.items() if not row.is_prompt]
        drafts = {request: self._guess(request) for request in streams if not plan.rows[request].is_new}
        chances = [self._chances(request, len(found)) for request, found in drafts.items()]
        num_tokens = sum(row.num_tokens for row in plan.rows.values())
        times = self._state.step_times
        seconds_of = times.seconds if times.are_measured else None
        counts = num_worthwhile(chances, num_tokens, len(streams), plan.budget, seconds_of, self._stall_s())
        for (request, found), count in zip(drafts.items(), counts, strict=True):
            if count:
                plan.put_drafts(request, tuple(found[:count]))
            elif request in self._sequences:
                self._sequences[request].acceptance.forget()

    def learn(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Takes in what became of a sequence's drafts."""
        self.counters["spec_drafts"] += 1
        self.counters["spec_draft_tokens"] += num_drafts
        self.counters["spec_accepted_tokens"] += num_accepted
        if request in self._sequences:
            self._sequences[request].acceptance.learn(num_drafts, num_accepted)

    def _guess(self, request: Request) -> list[int]:
        """The drafts that a row of `request` may have: what it may compute and keep, within its blocks."""
        if request.beams is not None or request.is_doubtful or request.num_in_flight > 1:
            return []
        last = min(request.max_num_tokens - 1, len(request.block_ids) * self._state.block_size)
        room = min(self._options.num_speculative_tokens, last - request.num_launched_tokens)
        if room <= 0:
            return []
        if request not in self._sequences:
            self._sequences[request] = GuessedSequence(request, self._options)
        return self._guesses(request, request.num_in_flight + room)[request.num_in_flight :]

    def _guesses(self, request: Request, count: int) -> list[int]:
        """Tokens that may follow those that the host knows."""
        return self._sequences[request].guesses(request, count)

    def _chances(self, request: Request, count: int) -> list[float]:
        if not count:
            return []
        # Behind a token in flight, whose guess must be right as well, they are less likely. That is so of the first
        # step with drafts alone, and what matters is what the steps behind it yield.
        chance = self._sequences[request].acceptance.chance
        return [chance ** (index + 1) for index in range(count)]

    def _forget_ended(self) -> None:
        running = self._state.queues.running
        if len(self._sequences) > 2 * len(running):
            self._sequences = {each: self._sequences[each] for each in running if each in self._sequences}
