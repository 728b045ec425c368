"""Gives the decode rows of a planned step drafts, and learns what became of them (docs/speculation.md).

A step with drafts is read before the next is decided, since nobody knows before where its sequences stand. Behind any
other step the next is decided while its tokens are in flight: then a sequence's drafts are those that follow the guess
for that token, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.speculation.gains import Gain
from tandem.engine.scheduling.speculation.lengths import Acceptance, Costs, num_worthwhile
from tandem.engine.scheduling.step import UNSEEN, SampleRow


class UnseenGuesses(NamedTuple):
    """Guesses that the device puts into the slots' tables itself, before the step that checks them."""

    counts: Mapping[Request, int]
    see: Callable[[], Mapping[Request, Sequence[int]]]  # what they are; blocks until they are on the host


class Guesser(Protocol):
    """Whoever guesses tokens, always behind those that the host knows."""

    @property
    def num_speculative_tokens(self) -> int:
        """How many drafts a row has at most."""

    def could_guess(self, request: Request, count: int) -> int:
        """How many tokens of `request` it could guess now, `count` at most."""

    def seconds(self, num_sequences: int) -> float:
        """What it takes the device to guess one more token of each of so many sequences; 0: nothing, or not known."""

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]] | UnseenGuesses:
        """Guesses so many tokens of each, no more than it could; none of whom it isn't ready for yet. Unseen, only if
        no sequence has tokens in flight."""

    def keep(self, running: Collection[Request]) -> None:
        """Forgets all requests but these."""


class Turn(NamedTuple):
    """A step that was planned, none of whose rows begins something, and what is to be learned from its turn."""

    gain: Gain
    may_draft: bool
    num_streams: int
    step_s: float  # what it takes without its drafts, alone
    device_s: float = 0.0  # what the device does with them; 0.0: it has none, or they stand behind tokens in flight
    is_usual: bool = True


class Speculator:
    """The drafts of one scheduler. `counters` count sequences that had drafts in a step, their drafts, and those that
    were right, all together and of each place."""

    def __init__(self, guesser: Guesser, state: SchedulerState, stall_s: Callable[[], float]) -> None:
        """`stall_s`: what the host takes for a step, for which the device waits where a step must be read before the
        next is decided."""
        self._guesser, self._state, self._stall_s = guesser, state, stall_s
        self._acceptances: dict[Request, Acceptance] = {}
        # By the number of streams, from one power of two to the next.
        self._gains: defaultdict[int, Gain] = defaultdict(Gain)
        self._turns: deque[Turn | None] = deque()  # of launched steps that are not read; None: it tells nothing
        self._newest_read: Turn | None = None
        self._completed_at = 0.0
        self._unseen: UnseenGuesses | None = None  # of the newest step
        self.counters = {"spec_drafts": 0, "spec_draft_tokens": 0, "spec_accepted_tokens": 0}
        self._accepted_at = [f"spec_accepted_at_{place}" for place in range(guesser.num_speculative_tokens)]
        self.counters |= dict.fromkeys(self._accepted_at, 0)

    @property
    def num_speculative_tokens(self) -> int:
        return self._guesser.num_speculative_tokens

    def add_drafts(self, plan: StepPlan) -> float:
        """Puts drafts into rows of the plan, as many as pay. They take no block: beyond its last one a sequence has
        none. Returns the seconds for which the device guessed while the host waited."""
        self._forget_ended()
        self._turns.append(None)
        streams = [request for request, row in plan.rows.items() if not row.is_prompt]
        if plan.preempted or not streams:
            return 0.0
        num_tokens = sum(row.num_tokens for row in plan.rows.values())
        times = self._state.step_times
        if not times.are_measured:
            return self._draft(plan, streams, num_tokens, None)[0]
        gain, step_s = self._gains[len(streams).bit_length()], times.seconds(num_tokens)
        may_draft, num_without = gain.begin_step(self._stall_s())
        turn, guess_s = Turn(gain, may_draft, len(streams), step_s), 0.0
        if may_draft:
            for acceptance in self._acceptances.values() if num_without else ():
                acceptance.forget(num_without)
            costs = Costs(gain.plain_s(step_s), times.seconds, gain.stall_s, self._guesser.seconds(len(streams)))
            guess_s, is_usual = self._draft(plan, streams, num_tokens, costs)
            turn = turn._replace(is_usual=is_usual, device_s=_device_s(plan, num_tokens, costs))
        if not any(row.is_prompt or row.is_new for row in plan.rows.values()):
            self._turns[-1] = turn
        return guess_s

    def _draft(
        self, plan: StepPlan, streams: Sequence[Request], num_tokens: int, costs: Costs | None
    ) -> tuple[float, bool]:
        """Returns the seconds for which the device guessed while the host waited, and whether it was ready for all of
        whom it was asked."""
        could = {request: self._num_possible(request) for request in streams if not plan.rows[request].is_new}
        chances = [self._chances(request, most) for request, most in could.items()]
        counts = num_worthwhile(chances, num_tokens, len(streams), plan.budget, costs)
        wanted = {request: count for request, count in zip(could, counts, strict=True) if count}
        began = self._state.clock.now()
        guessed = self._guess(wanted)
        for request in could:
            if drafts := guessed.get(request):
                plan.put_drafts(request, drafts)
            elif request in self._acceptances:
                self._acceptances[request].forget()
        waited_s = 0.0 if self._unseen else self._state.clock.now() - began
        return waited_s, len(guessed) == len(wanted)

    def drafts_of(self, samples: Sequence[SampleRow], requests: Sequence[Request]) -> list[int]:
        """The drafts of a step that has been done, the newest with any; `requests` are the samples'."""
        drafts = [sample.draft for sample in samples]
        if UNSEEN not in drafts:
            return drafts
        assert self._unseen is not None
        tokens = {request: iter(guessed) for request, guessed in self._unseen.see().items()}
        return [
            next(tokens[request]) if draft == UNSEEN else draft for draft, request in zip(drafts, requests, strict=True)
        ]

    def completed(self, num_accepted: int) -> None:
        """Hears that the results of the oldest step are there whose plan it was given, and how many of its drafts were
        right."""
        turn, before, now = self._turns.popleft(), self._newest_read, self._state.clock.now()
        seconds, self._completed_at, self._newest_read = now - self._completed_at, now, turn
        if turn is None:
            return
        if turn.may_draft:
            turn.gain.learn(1 + num_accepted / turn.num_streams, turn.step_s, seconds, turn.is_usual)
            if turn.device_s:
                turn.gain.learn_stall(seconds - turn.device_s)
            return
        beside = (before, *self._turns)
        drafting = next((each.gain for each in beside if each is not None and each.may_draft), None)
        if drafting is not None:  # guesses, or a device that waits behind them, took time of this turn, too
            drafting.learn(1.0, turn.step_s, seconds, is_usual=False)
        elif None not in beside:
            turn.gain.learn_plain(turn.step_s, seconds)

    def learn(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Takes in what became of a sequence's drafts."""
        self.counters["spec_drafts"] += 1
        self.counters["spec_draft_tokens"] += num_drafts
        self.counters["spec_accepted_tokens"] += num_accepted
        for name in self._accepted_at[:num_accepted]:
            self.counters[name] += 1
        if acceptance := self._acceptances.get(request):
            acceptance.learn(num_drafts, num_accepted)

    def _num_possible(self, request: Request) -> int:
        """How many drafts a row of `request` may have: what it may compute and keep, within its blocks."""
        if request.beams is not None or request.is_doubtful or request.num_in_flight > 1:
            return 0
        last = min(request.max_num_tokens - 1, len(request.block_ids) * self._state.block_size)
        room = min(self.num_speculative_tokens, last - request.num_launched_tokens)
        if room <= 0:
            return 0
        if request not in self._acceptances:
            self._acceptances[request] = Acceptance()
        return max(0, self._guesser.could_guess(request, request.num_in_flight + room) - request.num_in_flight)

    def _guess(self, wanted: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        """Drafts behind the tokens in flight, which are guessed with them."""
        self._unseen = None
        if not wanted:
            return {}
        guessed = self._guesser.guess({request: request.num_in_flight + count for request, count in wanted.items()})
        if isinstance(guessed, UnseenGuesses):
            self._unseen = guessed
            return {request: (UNSEEN,) * count for request, count in guessed.counts.items()}
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


def _device_s(plan: StepPlan, num_tokens: int, costs: Costs) -> float:
    """What the device has to do for a step, and 0.0 where its turn is not like those that follow: it has no drafts, or
    they stand behind tokens in flight."""
    drafts = [len(row.drafts) for row in plan.rows.values()]
    if not any(drafts) or any(request.num_in_flight for request in plan.rows):
        return 0.0
    return costs.of_step(num_tokens + sum(drafts), max(drafts))
