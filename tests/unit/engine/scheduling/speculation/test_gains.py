"""Drafts cease where they don't pay, as measured: the scheduler's own loop over a device and a host in virtual time."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import numpy as np
import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.ports import BetweenLayers
from tandem.engine.scheduling.request import Request, TokensEvent
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.speculation.gains import (
    FIRST_CREDIT,
    MOST_CREDIT,
    MOST_LOST,
    PLAIN_STEPS,
    STEPS_BETWEEN,
    Gain,
)
from tandem.engine.scheduling.step import RunnerOutput, SchedulerOutput
from tests.fakes.made_requests import made_request

STEP_S = {1: 0.0039, 16: 0.0042, 64: 0.0048, 128: 0.0056, 256: 0.0076, 512: 0.0125}  # an 8B model's, about
WRONG = 5


def token_at(position: int) -> int:
    """What the model says there."""
    return 10 + position % 400


class Machine:
    """Runner, guesser and clock at once. The host takes `launch_s` for a launch, `read_s` for results, `row_s` for each
    row of both and `lookup_s` for each look-up, now and then a fifth more. Each draft is right with chance `right`."""

    def __init__(
        self,
        *,
        guesses: bool,
        right: float = 0.7,
        num_speculative_tokens: int = 3,
        launch_s: float = 0.0005,
        read_s: float = 0.0005,
        row_s: float = 4e-6,
        lookup_s: float = 5e-6,
    ) -> None:
        self.num_speculative_tokens, self.right = num_speculative_tokens, right
        self.now, self._free_at, self._rng = 1.0, 0.0, random.Random(0)
        self._launch_s, self._read_s, self._row_s, self._lookup_s = launch_s, read_s, row_s, lookup_s
        self.num_unready = 0  # steps for which the guesser still has to prepare, each for as long as a step takes
        self.num_lookups = self.num_tokens = 0
        self.drafted: list[bool] = []  # of each step
        options = SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=8192)
        state = SchedulerState(
            options,
            BlockPool(4096, False),
            block_size=64,
            max_model_len=10**6,
            eos_token_ids=[],
            root_for_salt=lambda salt: root_hash(b"model", salt),
            clock=StepClock(lambda: self.now),
        )
        state.step_times.measured(STEP_S)
        self._times = state.step_times
        self._state, self._num_added = state, 0
        self._core = EngineCore(Scheduler(state, guesser=self if guesses else None), self)

    def add(self, num: int, max_tokens: int = 10**5) -> None:
        for _ in range(num):
            self._num_added += 1
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            tokens = np.arange(16, dtype=np.int32)
            self._state.add(made_request(str(self._num_added), tokens, sampling, arrival=self._num_added))

    def rate(self, num_turns: int) -> float:
        """Tokens a second of so many turns."""
        began, had = self.now, self.num_tokens
        for _ in range(num_turns):
            self.num_tokens += sum(
                len(event.token_ids) for event in self._core.step() if isinstance(event, TokensEvent)
            )
        return (self.num_tokens - had) / (self.now - began)

    def share_drafted(self, num_steps: int) -> float:
        return sum(self.drafted[-num_steps:]) / num_steps

    def _host(self, seconds: float) -> None:
        self.now += seconds * (1 + 0.2 * self._rng.random())

    # --- the runner -----------------------------------------------------------------------------------------

    def execute(self, output: SchedulerOutput, between_layers: BetweenLayers | None = None) -> Launched:
        self._host(self._launch_s + self._row_s * output.num_tokens)
        self._free_at = max(self.now, self._free_at) + self._times.seconds(output.num_tokens)
        self.drafted.append(output.has_drafts)
        return Launched(self, output, self._free_at)

    def read(self, output: SchedulerOutput, ended_at: float) -> RunnerOutput:
        self.now = max(self.now, ended_at)
        self._host(self._read_s + self._row_s * len(output.samples))
        tokens = [token_at(sample.position) for sample in output.samples]
        return RunnerOutput(output.step_id, np.array(tokens, np.int32))

    # --- the guesser ----------------------------------------------------------------------------------------

    def could_guess(self, request: Request, count: int) -> int:
        self.num_lookups += 1
        self._host(self._lookup_s)
        return count

    def seconds(self, num_sequences: int) -> float:
        return 0.0

    def keep(self, running: Collection[Request]) -> None: ...

    def guess(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        if self.num_unready:
            self.num_unready -= 1
            self.now += STEP_S[64]
            return {}
        return {request: self._guesses(request.num_tokens, count) for request, count in wanted.items()}

    def _guesses(self, start: int, count: int) -> list[int]:
        places = range(start, start + count)
        return [token_at(place) if self._rng.random() < self.right else WRONG for place in places]


class Launched:
    """A step on the machine's device."""

    def __init__(self, machine: Machine, output: SchedulerOutput, ends_at: float) -> None:
        self._machine, self._output, self._ends_at = machine, output, ends_at

    def done(self) -> bool:
        return self._machine.now >= self._ends_at

    def sample(self) -> None: ...

    def result(self) -> RunnerOutput:
        return self._machine.read(self._output, self._ends_at)


SLOW_HOST = {"launch_s": 0.0012, "read_s": 0.0018, "lookup_s": 25e-6}


def pair(streams: int, **machine: float) -> tuple[Machine, Machine]:
    """One machine that guesses and one that doesn't, some steps after they began with so many streams."""
    both = Machine(guesses=True, **machine), Machine(guesses=False, **machine)  # type: ignore[arg-type]
    for each in both:
        each.add(streams)
        each.rate(4)
    return both


@pytest.mark.parametrize(("right", "num"), [(0.5, 3), (0.7, 4)])
def test_where_the_host_is_slow_drafts_soon_cease_and_cost_next_to_nothing(right: float, num: int) -> None:
    guessing, plain = pair(64, right=right, num_speculative_tokens=num, **SLOW_HOST)
    usual = plain.rate(100)
    assert guessing.rate(200) > 0.97 * usual
    num_lookups = guessing.num_lookups
    assert guessing.rate(500) > 0.98 * usual
    assert 0 < guessing.share_drafted(500) < 0.05  # tried again now and then
    assert guessing.num_lookups - num_lookups < 0.05 * 64 * 500  # who may have no drafts is not looked up either


@pytest.mark.parametrize(("streams", "right", "least"), [(1, 0.7, 1.6), (8, 0.7, 1.5), (64, 0.9, 1.3)])
def test_where_drafts_pay_they_stay(streams: int, right: float, least: float) -> None:
    guessing, plain = pair(streams, right=right)
    assert guessing.rate(600) > least * plain.rate(100)
    assert guessing.share_drafted(250) > 0.95


def test_drafts_that_get_better_come_back_and_go_again() -> None:
    guessing, plain = pair(64, right=0.2)
    usual = plain.rate(100)
    guessing.rate(200)
    assert guessing.share_drafted(150) < 0.05
    guessing.right = 0.9
    guessing.rate(400)
    assert guessing.rate(200) > 1.3 * usual
    assert guessing.share_drafted(80) > 0.95
    guessing.right = 0.2
    guessing.rate(100)
    assert guessing.rate(200) > 0.97 * usual


def test_what_was_seen_of_many_streams_is_not_held_against_few() -> None:
    guessing = Machine(guesses=True, right=0.6)
    guessing.add(1)
    guessing.rate(40)
    guessing.add(63, max_tokens=150)
    guessing.rate(120)
    assert guessing.share_drafted(80) < 0.1
    guessing.rate(130)
    assert guessing.share_drafted(30) > 0.5


def test_prompts_beside_streams_blur_nothing() -> None:
    guessing, plain = pair(48, right=0.5, **SLOW_HOST)
    rates = []
    for machine in (guessing, plain):
        began, had = machine.now, machine.num_tokens
        for _ in range(40):
            machine.add(2, max_tokens=80)
            machine.rate(12)
        rates.append((machine.num_tokens - had) / (machine.now - began))
    assert rates[0] > 0.97 * rates[1]


def test_a_guesser_that_has_to_prepare_is_given_the_time() -> None:
    guessing, plain = pair(64, right=0.9)
    guessing.num_unready = 30
    usual = plain.rate(100)
    guessing.rate(120)
    assert guessing.num_unready == 0
    assert guessing.rate(200) > 1.3 * usual


# --- the rule alone -----------------------------------------------------------------------------------------


def begun(gain: Gain, most_steps: int) -> int:
    """How many steps go by until one may have drafts, with a turn of 5 ms for each."""
    for number in range(most_steps):
        may_draft, num_without = gain.begin_step(0.001)
        if may_draft:
            assert num_without >= PLAIN_STEPS
            return number
        gain.learn_plain(0.004, 0.005)
    raise AssertionError("no step may have drafts")


def test_a_stretch_lasts_until_its_credit_is_lost_and_is_paid_for() -> None:
    gain = Gain()
    assert begun(gain, 100) == PLAIN_STEPS
    assert gain.plain_s(0.008) == pytest.approx(0.010)
    num_with = 0
    while gain.begin_step(0.001)[0]:
        gain.learn(1.8, 0.004, 0.010, is_usual=True)  # two turns for 1.8 tokens
        num_with += 1
    assert num_with == pytest.approx(FIRST_CREDIT / (0.2 - MOST_LOST), abs=1)
    assert begun(gain, 1000) == pytest.approx(0.2 * num_with / MOST_LOST, abs=PLAIN_STEPS + 1)


def test_what_was_gained_is_kept_as_credit_up_to_a_bound() -> None:
    gain = Gain()
    begun(gain, 100)
    for _ in range(100):
        gain.begin_step(0.0)
        gain.learn(2.0, 0.004, 0.005, is_usual=True)
    num_bad = 0
    while gain.begin_step(0.0)[0]:
        gain.learn(1.0, 0.004, 0.010, is_usual=True)
        num_bad += 1
    assert num_bad == pytest.approx(MOST_CREDIT, abs=1)
    assert begun(gain, 100) == PLAIN_STEPS - 1  # all in all it gained


def test_turns_without_drafts_are_measured_again_however_much_is_gained() -> None:
    gain = Gain()
    begun(gain, 100)
    num_steps = 1
    while gain.begin_step(0.0)[0]:
        gain.learn(2.0, 0.004, 0.005, is_usual=True)
        num_steps += 1
    assert num_steps == STEPS_BETWEEN
    assert begun(gain, 100) == PLAIN_STEPS - 1


def test_what_does_not_recur_ends_no_stretch_but_is_paid_for() -> None:
    gain = Gain()
    begun(gain, 100)
    for _ in range(3):
        gain.learn(1.0, 0.004, 0.010, is_usual=False)
    assert gain.begin_step(0.0)[0]
    for _ in range(2):
        gain.learn(1.0, 0.004, 0.010, is_usual=True)
    assert not gain.begin_step(0.0)[0]
    assert begun(gain, 1000) == pytest.approx(5 / MOST_LOST, abs=PLAIN_STEPS)


def test_the_wait_behind_drafts_is_learned_anew_in_each_stretch() -> None:
    gain = Gain()
    begun(gain, 100)
    assert gain.stall_s == 0.001
    for _ in range(50):
        gain.learn_stall(0.003)
    assert gain.stall_s == pytest.approx(0.003, rel=0.01)
    while gain.begin_step(0.0)[0]:
        gain.learn(1.0, 0.004, 0.010, is_usual=True)
    begun(gain, 1000)
    assert gain.stall_s == 0.001


def test_of_the_first_turns_none_counts_for_more_than_another() -> None:
    gain = Gain()
    for seconds in (2.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        gain.learn_plain(1.0, seconds)
    assert gain.plain_s(1.0) == pytest.approx(7 / 6)
    for _ in range(100):
        gain.learn_plain(1.0, 1.5)
    assert gain.plain_s(1.0) == pytest.approx(1.5, rel=0.01), "and newer ones count in the end"
