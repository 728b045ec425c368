"""Gives the decode rows of a planned step drafts, and learns what became of them (docs/speculation.md).

A step with drafts is read before the next is decided, since nobody knows before where its sequences stand. Behind any
other step the next is decided while its tokens are in flight: then a sequence's drafts are those that follow the guess
for that token, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.lengths import Acceptance, TurnLengths, num_worthwhile


class Guesser(Protocol):
    """Whoever guesses tokens, always behind those that the host knows."""

    @property
    def num_speculative_tokens(self) -> int:
        """How many drafts a row has at most."""

    def could_guess(self, request: Request, count: int) -> int:
        """How many tokens of `request` it could guess now, `count` at most."""

    def seconds(self, num_sequences: int) -> float:
        """What it takes the device to guess one more token of each of so many sequences; 0: nothing, or not known."""

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Guesses so many tokens of each, no more than it could; none of whom it isn't ready for yet."""

    def keep(self, running: Collection[Request]) -> None:
        """Forgets all requests but these."""


class Speculator:
    """The drafts of one scheduler. `counters` count sequences that had drafts in a step, their drafts, and those that
    were right, all together and of each place."""

    def __init__(self, guesser: Guesser, state: SchedulerState, stall_s: Callable[[], float]) -> None:
        """`stall_s`: what the host takes for a step, for which the device waits where a step must be read before the
        next is decided."""
        self._guesser, self._state, self._stall_s = guesser, state, stall_s
        self._acceptances: dict[Request, Acceptance] = {}
        self._turns, self._completed_at = TurnLengths(), 0.0
        # Of each launched step: whether it has drafts, and the seconds that its turn should take; None: not known.
        self._expected: deque[tuple[bool, float] | None] = deque()
        self.counters = {"spec_drafts": 0, "spec_draft_tokens": 0, "spec_accepted_tokens": 0}
        self.counters |= {f"spec_accepted_at_{place}": 0 for place in range(guesser.num_speculative_tokens)}

    @property
    def num_speculative_tokens(self) -> int:
        return self._guesser.num_speculative_tokens

    def add_drafts(self, plan: StepPlan) -> float:
        """Puts drafts into rows of the plan, as many as pay. They take no block: beyond its last one a sequence has
        none. Returns the seconds for which the device guessed."""
        self._forget_ended()
        self._expected.append(None)
        if plan.preempted:
            return 0.0
        streams = [request for request, row in plan.rows.items() if not row.is_prompt]
        could = {request: self._num_possible(request) for request in streams if not plan.rows[request].is_new}
        chances = [self._chances(request, most) for request, most in could.items()]
        num_tokens = sum(row.num_tokens for row in plan.rows.values())
        times = self._state.step_times
        seconds_of = times.seconds if times.are_measured else None
        costs = self._stall_s(), self._guesser.seconds(sum(map(bool, chances)))
        slowness = self._turns.slowness
        counts = num_worthwhile(chances, num_tokens, len(streams), plan.budget, seconds_of, *costs, slowness)
        wanted = {request: count for request, count in zip(could, counts, strict=True) if count}
        began = self._state.clock.now()
        guessed = self._guess(wanted)
        for request in could:
            if drafts := guessed.get(request):
                plan.put_drafts(request, drafts)
            elif request in self._acceptances:
                self._acceptances[request].forget()
        if seconds_of is not None:
            self._expected[-1] = _expected(plan, num_tokens, seconds_of, *costs)
        return self._state.clock.now() - began

    def completed(self) -> None:
        """Hears that the results of the oldest step are there whose plan it was given."""
        expected, now = self._expected.popleft(), self._state.clock.now()
        if expected is not None:
            self._turns.learn(*expected, now - self._completed_at)
        self._completed_at = now

    def learn(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Takes in what became of a sequence's drafts."""
        self.counters["spec_drafts"] += 1
        self.counters["spec_draft_tokens"] += num_drafts
        self.counters["spec_accepted_tokens"] += num_accepted
        for place in range(num_accepted):
            self.counters[f"spec_accepted_at_{place}"] += 1
        if request in self._acceptances:
            self._acceptances[request].learn(num_drafts, num_accepted)

    def _num_possible(self, request: Request) -> int:
        """How many drafts a row of `request` may have: what it may compute and keep, within its blocks."""
        if request.beams is not None or request.is_doubtful or request.num_in_flight > 1:
            return 0
        last = min(request.max_num_tokens - 1, len(request.block_ids) * self._state.block_size)
        room = min(self.num_speculative_tokens, last - request.num_launched_tokens)
        if room <= 0:
            return 0
        self._acceptances.setdefault(request, Acceptance())
        return max(0, self._guesser.could_guess(request, request.num_in_flight + room) - request.num_in_flight)

    def _guess(self, wanted: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        """Drafts behind the tokens in flight, which are guessed with them."""
        if not wanted:
            return {}
        guessed = self._guesser.guess({request: request.num_in_flight + count for request, count in wanted.items()})
        return {request: tuple(tokens[request.num_in_flight :]) for request, tokens in guessed.items()}

    def _chances(self, request: Request, count: int) -> list[float]:
        if not count:
            return []
        # Behind a token in flight, whose guess must be right as well, they are less likely. That is so of the first
        # step with drafts alone, and what matters is what the steps behind it yield.
        chance = self._acceptances[request].chance
        return [chance ** (index + 1) for index in range(count)]

    def _forget_ended(self) -> None:
        running = self._state.queues.running
        if len(self._acceptances) > 2 * len(running):
            self._acceptances = {each: self._acceptances[each] for each in running if each in self._acceptances}
            self._guesser.keep(running)


def _expected(
    plan: StepPlan, num_tokens: int, seconds_of: Callable[[int], float], stall_s: float, guess_s: float
) -> tuple[bool, float] | None:
    """Whether the step has drafts, and the seconds from the results of the one before to its own. None: it begins
    something, or its drafts stand behind tokens in flight, so that its turn is not like those that follow."""
    if any(row.is_prompt or row.is_new for row in plan.rows.values()):
        return None
    drafts = [len(row.drafts) for row in plan.rows.values()]
    if not any(drafts):
        return False, max(seconds_of(num_tokens), stall_s)
    if any(request.num_in_flight for request in plan.rows):
        return None
    return True, seconds_of(num_tokens + sum(drafts)) + stall_s + max(drafts) * guess_s
