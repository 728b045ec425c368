"""One answer to when the device will be free, whoever asks."""

from __future__ import annotations

import pytest
from engine_harness import Harness

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.step_pace import PROMPT_ERROR, PROMPT_LEAD_S, next_prompt_decision_at


class Device:
    def __init__(self, *, by_size: bool) -> None:
        self.now = 10.0
        self.clock = StepClock(lambda: self.now, by_size=by_size)

    def run(self, num_tokens: int, seconds: float, may_wait: bool = False, num_decodes: int = 0) -> None:
        self.clock.launched(0, num_tokens + num_decodes, num_tokens)
        self.now += seconds
        self.clock.completed(0, may_wait)


@pytest.mark.parametrize(("by_size", "seconds"), [(False, 0.05), (True, 0.2)])
def test_a_chunk_takes_what_its_tokens_take_and_a_step_beside_decodes_what_its_size_took(
    by_size: bool, seconds: float
) -> None:
    device = Device(by_size=by_size)
    device.run(2000, 0.2, num_decodes=8)
    for _ in range(100):
        device.run(4000, 0.1, num_decodes=8)
    device.clock.launched(1, 2008, 2000)
    assert device.clock.ends_at() == pytest.approx(device.now + seconds)


@pytest.mark.parametrize("by_size", [False, True])
def test_a_long_step_of_prompts_alone_is_not_taken_for_its_fastest_like(by_size: bool) -> None:
    """The chunks of a prompt attend to more and more: one of 2,048 tokens takes 38 to 50 ms."""
    device = Device(by_size=by_size)
    for _ in range(20):
        for seconds in (0.038, 0.042, 0.046, 0.050):
            device.run(2048, seconds)
    for _ in range(1000):  # of which the time is mostly the decodes'
        device.run(32, 0.005, num_decodes=64)
    device.run(2048, 0.042)
    device.clock.launched(1, 2048, 2048)
    expected = device.clock.ends_at() - device.now
    assert 0.042 < expected < 0.047 if by_size else expected > 0.042
    assert device.clock.began_at() == device.now


@pytest.mark.parametrize("by_size", [False, True])
def test_steps_that_may_wait_for_other_nodes_say_nothing_of_this_one(by_size: bool) -> None:
    device = Device(by_size=by_size)
    device.run(2000, 0.3, may_wait=True)
    device.clock.launched(1, 2000, 2000)
    assert device.clock.ends_at() == pytest.approx(device.now + 0.3), "but it is all that is known"
    device.clock.completed(1)
    for _ in range(100):
        device.run(2000, 0.1)
    for _ in range(100):
        device.run(2000, 0.3, may_wait=True)
    device.clock.launched(1, 2000, 2000)
    assert device.clock.ends_at() == pytest.approx(device.now + 0.1)
    assert device.clock.seconds_per_token == pytest.approx(0.1 / 2000)


def test_the_loop_the_order_and_the_next_decision_hear_of_the_same_end() -> None:
    device = Device(by_size=False)
    device.run(2000, 0.1)
    device.clock.launched(1, 4000, 4000)
    began = device.now
    device.now += 0.15
    assert device.clock.ends_at() == device.clock.busy_until() == pytest.approx(began + 0.2)
    assert next_prompt_decision_at(device.clock) == pytest.approx(began + 0.2 * (1 - PROMPT_ERROR) - PROMPT_LEAD_S)
    device.clock.launched(2, 2000, 2000)
    assert device.clock.ends_at() == pytest.approx(began + 0.2)
    assert device.clock.busy_until() == pytest.approx(began + 0.3), "steps run one after the other"


@pytest.mark.parametrize("by_size", [False, True])
def test_a_device_without_work_is_free_now(by_size: bool) -> None:
    device = Device(by_size=by_size)
    assert device.clock.busy_until() == device.now
    assert device.clock.ends_at() < device.now
    device.run(2000, 0.1)
    device.clock.launched(1, 2000, 2000)
    device.now += 0.5
    assert device.clock.busy_until() == device.now, "it is longer than expected, and may end at any time"
    device.clock.completed(1)
    assert device.clock.running is None


def test_every_step_of_a_scheduler_is_on_the_clock_until_it_is_read() -> None:
    device = Device(by_size=True)
    harness = Harness(clock=device.clock)
    harness.add("a", range(20), max_tokens=4)
    harness.step()
    running = device.clock.running
    assert running is not None
    assert (running.num_tokens, running.num_prompt_tokens) == (16, 16)
    harness.step()
    running = device.clock.running
    assert running is not None
    assert (running.num_tokens, running.num_prompt_tokens) == (4, 4), "launched before the first was read"
    harness.run()
    assert device.clock.running is None
