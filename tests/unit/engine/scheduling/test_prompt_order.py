"""Which prompts a prefill node computes first: by deadline while that helps, and nobody starves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_harness import Harness

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.rate import LATE_STRETCH
from tandem.engine.scheduling.clock import MEASURED_TOKENS, StepClock
from tandem.engine.scheduling.prompt_order import LATE_SHARE, ArrivalOrder, PromptOrder, SlackOrder
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step_pace import next_prompt_decision_at
from tests.fakes.made_requests import made_request

TARGET_S = 0.3
PER_TOKEN_S = 25e-6
RATE = 40_000  # tokens a second of the simulated device
SCALE = 128  # the harness's sequences are short: one of its tokens stands for so many


class Clock:
    """A device whose steps are prompts alone, and its time."""

    def __init__(self, measured_tokens: int = MEASURED_TOKENS) -> None:
        self.now = 100.0
        self.steps = StepClock(lambda: self.now, by_size=False, measured_tokens=measured_tokens)

    def launch(self, order: PromptOrder, step_id: int, tokens: list[tuple[Request, int]]) -> None:
        num_tokens = sum(count for _, count in tokens)
        order.launched(tokens)
        self.steps.launched(step_id, num_tokens, num_tokens)


def prompt(length: int, name: str = "r", priority: int = 0) -> Request:
    return made_request(name, np.arange(length, dtype=np.int32), priority=priority)


def slack_order(clock: Clock) -> SlackOrder:
    clock.steps.prompt_rate.seconds = PER_TOKEN_S
    return SlackOrder(TARGET_S, clock.steps)


def arriving(order: SlackOrder, clock: Clock, *lengths: int, apart_s: float = 0.0) -> list[Request]:
    requests = [prompt(length) for length in lengths]
    for number, request in enumerate(requests):
        request.order = number
        order.arrived(request)
        clock.now += apart_s
    return requests


class TestSlackOrder:
    def test_the_earliest_deadline_goes_first(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        long, first, second = arriving(order, clock, 14_000, 256, 256, apart_s=0.001)
        assert order.arrange([], [first, second, long]) == [first, second, long]
        assert order.deadline(long) > clock.now + TARGET_S, "alone it takes longer than the target"

    def test_the_earlier_deadline_goes_before_the_earlier_arrival(self) -> None:
        """Both ways all would be in time."""
        clock = Clock()
        order = slack_order(clock)
        long, chat = arriving(order, clock, 10_500, 256, apart_s=0.001)
        assert order.arrange([], [long, chat]) == [chat, long]
        assert not order.has_late

    def test_what_is_cached_by_now_is_no_work(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        requests = first, second, cached = arriving(order, clock, 8_000, 9_000, 9_000)
        arranged = order.arrange([], requests, lambda request: 8_900 if request is cached else 0)
        assert arranged == [first, cached, second], "two whole ones would be too much"

    def test_priority_goes_before_deadline(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        early, late = arriving(order, clock, 512, 512, apart_s=0.01)
        late.prompt = replace(late.prompt, priority=-1)
        assert order.arrange([], [early, late]) == [late, early]

    def test_what_cannot_be_in_time_goes_last_and_leaves_the_others_their_time(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        first, second, chat = arriving(order, clock, 8192, 8192, 256, apart_s=0.01)
        assert order.arrange([first], [second, chat]) == [first, chat, second]

    def test_a_prompt_that_has_not_begun_needs_time_to_spare(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        came = clock.now
        long, chat = arriving(order, clock, 8192, 256, apart_s=0.04)
        clock.now = came + TARGET_S - 8192 * PER_TOKEN_S - 0.004
        assert order.arrange([long], [chat]) == [long, chat]
        assert order.arrange([], [long, chat]) == [chat, long]

    def test_the_rest_of_the_running_step_counts(self) -> None:
        """50 ms of it and 60 of its own are more than the 100 that are left."""
        clock = Clock()
        order = slack_order(clock)
        running, medium, chat = arriving(order, clock, 10_000, 2_400, 256)
        clock.launch(order, 0, [(running, 10_000)])
        clock.now += 0.2
        assert order.arrange([], [medium, chat]) == [chat, medium]
        clock.steps.completed(0)
        assert order.arrange([], [medium, chat]) == [medium, chat]

    def test_the_largest_gives_way_so_that_the_fewest_are_late(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        long, *chats = arriving(order, clock, 8192, *[1024] * 6)
        assert order.arrange([], [long, *chats]) == [*chats, long]

    def test_of_late_prompts_a_tail_passes_whole_ones_but_not_for_ever(self) -> None:
        """The first prompt with a prefix computes it; the others are tails from then on."""
        clock = Clock()
        order = slack_order(clock)
        requests = whole, other, tail = arriving(order, clock, 4352, 4352, 4352, apart_s=0.001)
        clock.now += 1.0
        assert order.arrange([], requests) == [whole, other, tail]

        def num_cached(request: Request) -> int:
            return 4096 if request is tail else 0

        assert order.arrange([], requests, num_cached) == [tail, whole, other]
        assert order.arrange([whole], [other, tail], num_cached) == [tail, whole, other]
        whole.num_computed_tokens = 4096
        assert order.arrange([whole], [other, tail], num_cached) == [whole, tail, other], "equally much is left of both"
        clock.now += LATE_STRETCH * 4096 * PER_TOKEN_S
        (tail,) = arriving(order, clock, 4352)
        clock.now += 1.0
        assert order.arrange([], [other, tail], num_cached) == [other, tail], "it has waited long enough"

    def test_late_prompts_get_their_share_and_no_more(self) -> None:
        """Load far beyond what can be done in time: prompts in time come on and on, one is late."""
        clock = Clock()
        order = slack_order(clock)
        (late,) = arriving(order, clock, 4096)
        clock.now += 1.0
        spent = {True: 0, False: 0}
        for step in range(400):
            (chat,) = arriving(order, clock, 2048)
            chosen = order.arrange([], [late, chat])[0]
            clock.launch(order, step, [(chosen, 2048)])
            spent[chosen is late] += 2048
            clock.now += 2048 * PER_TOKEN_S
            clock.steps.completed(step)
            order.ended(chat)
        assert spent[True] / (spent[True] + spent[False]) == pytest.approx(LATE_SHARE, rel=0.2)
        assert spent[True] > 8 * 2048, "it does not starve"

    def test_it_measures_what_a_token_takes(self) -> None:
        clock = Clock()
        order = SlackOrder(TARGET_S, clock.steps)
        request = prompt(100_000)
        order.arrived(request)
        for step in range(60):
            clock.launch(order, step, [(request, 2048)])
            clock.now += 2048 * 40e-6
            clock.steps.completed(step)
        clock.launch(order, 60, [(request, 4)])
        clock.now += 5.0
        clock.steps.completed(60)
        assert clock.steps.seconds_per_token == pytest.approx(40e-6, rel=0.01)

    def test_the_next_decision_is_due_shortly_before_the_step_should_end(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        assert next_prompt_decision_at(clock.steps) == 0.0
        request = prompt(100_000)
        order.arrived(request)
        clock.launch(order, 0, [(request, 8192)])
        expected = 8192 * clock.steps.seconds_per_token
        began = clock.now
        assert began + 0.85 * expected < next_prompt_decision_at(clock.steps) < began + expected - 0.01
        clock.now += 0.9 * expected
        clock.launch(order, 1, [(request, 2048)])
        clock.now += 0.1 * expected
        clock.steps.completed(0)
        assert next_prompt_decision_at(clock.steps) < clock.now + 2048 * clock.steps.seconds_per_token

    def test_a_stream_that_was_taken_over_and_lost_its_blocks_may_be_late(self) -> None:
        """It never arrived here: a node of which it was asked ended with a KeyError."""
        clock = Clock()
        order = slack_order(clock)
        (short,) = arriving(order, clock, 256)
        stream = prompt(60_000)
        stream.first_token_at = clock.now - 1.0
        assert order.arrange([], [stream, short]) == [short, stream]
        order.ended(stream)
        assert set(order._arrivals) == {short}

    def test_it_forgets_who_is_gone(self) -> None:
        clock = Clock()
        order = slack_order(clock)
        harness = Harness(prompt_order=order, clock=clock.steps, max_num_batched_tokens=8)
        harness.add("a", range(30), max_tokens=3)
        harness.add("b", range(20), samples=(0, 1), max_tokens=3)
        harness.scheduler.state.abort(AttemptKey("a", 0))
        harness.run()
        assert not order._arrivals
        assert clock.steps.running is None


@pytest.mark.parametrize(("lengths", "wait_s", "num_tokens"), [((24,), 0, 24), ((24, 8), 0, 8), ((24,), 9, 8)])
def test_steps_are_short_while_others_wait_or_nobody_is_in_time(
    lengths: tuple[int, ...], wait_s: float, num_tokens: int
) -> None:
    clock = Clock()
    harness = Harness(
        prompt_order=slack_order(clock), clock=clock.steps, max_num_batched_tokens=32, contended_prefill_chunk=8
    )
    for length in lengths:
        harness.add(f"of {length}", range(1, length + 1), max_tokens=2)
    clock.now += wait_s
    output = harness.scheduler.schedule()
    assert output is not None
    assert output.num_tokens == num_tokens


def test_small_steps_count_together() -> None:
    clock, order, request = Clock(measured_tokens=256), ArrivalOrder(), prompt(8_192)
    for step in range(5):
        clock.launch(order, step, [(request, 64)])
        clock.now += 0.010
        clock.steps.completed(step)
        assert (clock.steps.seconds_per_token == 0.0) == (step < 3)
    assert clock.steps.seconds_per_token == pytest.approx(0.010 / 64)


def simulate(order: PromptOrder, clock: Clock, chunk: int) -> dict[str, float]:
    """The real scheduler before a simulated device: 16 requests/s, one in five of 8,192 tokens, the others of
    256. Share of each kind whose first token came within the target."""
    harness = Harness(num_blocks=16 * 64, prompt_order=order, clock=clock.steps,
                      max_num_batched_tokens=8192 // SCALE, max_num_seqs=64, max_prefill_chunk=2 * chunk // SCALE,
                      contended_prefill_chunk=chunk // SCALE)  # fmt: skip
    rng = np.random.default_rng(7)
    arrivals = clock.now + np.cumsum(rng.exponential(1 / 16, 600))
    lengths = np.where(rng.random(600) < 0.2, 8192 // SCALE - 4, 256 // SCALE)
    came: dict[str, float] = {}
    took: dict[str, float] = {}
    number = 0
    while len(took) < len(arrivals):
        while number < len(arrivals) and arrivals[number] <= clock.now:
            name = f"{'long' if lengths[number] > 8 else 'chat'}-{number}"
            came[name] = arrivals[number]
            tokens = rng.integers(100, 30_000, lengths[number]).tolist()
            harness.add(name, tokens, max_tokens=1, mode="prefill")
            number += 1
        before = harness.runner.num_computed_tokens
        if harness.core.has_work():
            harness.core.step()
        computed = harness.runner.num_computed_tokens - before
        clock.now += computed * SCALE / RATE if computed else 0.001
        for name in list(harness.connector.held):
            harness.connector.release(name)
        for name in harness.connector.finished:
            took.setdefault(name, clock.now - came[name])
    in_time = {"chat": [], "long": []}
    for name, seconds in took.items():
        in_time[name[:4]].append(seconds <= TARGET_S)
    return {kind: float(np.mean(values)) for kind, values in in_time.items()}


def test_more_prompts_come_in_time_than_in_order_of_arrival() -> None:
    clock = Clock()
    order = SlackOrder(TARGET_S, clock.steps)
    clock.steps.prompt_rate.seconds = SCALE / RATE
    by_slack = simulate(order, clock, chunk=1024)
    by_arrival = simulate(ArrivalOrder(), Clock(), chunk=0)
    assert by_slack["chat"] >= 0.97
    assert by_slack["long"] >= 0.6
    assert by_arrival["chat"] < 0.9
    assert by_arrival["long"] < by_slack["long"]
