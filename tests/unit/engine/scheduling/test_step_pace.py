"""When the step after the running one is decided, by what such steps took."""

from __future__ import annotations

import pytest

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.step_pace import MOST_TOKENS, SPARE_S, StepPace

HOST_S = 0.001  # planning and launching a step
LEAD_S = HOST_S + SPARE_S


class Device:
    """Runs steps one after the other; the next one is launched when one begins."""

    def __init__(self) -> None:
        self.now = 10.0
        self.clock = StepClock(lambda: self.now)
        self.pace = StepPace(self.clock)
        self.num_launched = 0
        self.host_s = HOST_S

    def launch(self, num_tokens: int) -> None:
        self.now -= self.host_s  # beside the step that runs
        self.pace.decided()
        self.now += self.host_s
        self.clock.launched(self.num_launched, num_tokens, 0)
        self.pace.executed(num_tokens)
        self.num_launched += 1

    def run(self, seconds: float, step_id: int | None = None) -> None:
        """The step that was launched last, or the one before it."""
        self.now += seconds
        self.clock.completed(self.num_launched - 1 if step_id is None else step_id)

    def learn(self, num_tokens: int, seconds: float, times: int = 100) -> None:
        for _ in range(times):
            self.launch(num_tokens)
            self.run(seconds)


def test_the_next_step_is_decided_shortly_before_the_running_one_ends() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.launch(18)
    assert device.pace.next_decision_at() == pytest.approx(device.now + 0.0046 - LEAD_S)
    assert device.pace.next_decision_at(0.001) == pytest.approx(device.now + 0.0056 - LEAD_S)


def test_a_running_step_began_when_the_one_before_it_ended() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.launch(17)
    device.now += 0.003
    device.launch(17)
    device.run(0.0016, step_id=device.num_launched - 2)
    assert device.pace.next_decision_at() == pytest.approx(device.now + 0.0046 - LEAD_S)


def test_steps_of_other_sizes_have_times_of_their_own() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.learn(143, 0.0058)
    device.launch(144)
    assert device.pace.next_decision_at() == pytest.approx(device.now + 0.0058 - LEAD_S)


@pytest.mark.parametrize("num_tokens", [300, MOST_TOKENS + 1])
def test_what_was_never_measured_or_takes_long_to_launch_is_not_waited_for(num_tokens: int) -> None:
    device = Device()
    device.learn(17, 0.0046)
    if num_tokens > MOST_TOKENS:
        device.learn(num_tokens, 0.08)
    device.launch(num_tokens)
    assert device.pace.next_decision_at(0.001) < device.now
    assert StepPace(StepClock(lambda: 5.0)).next_decision_at() == 0.0, "nor when nothing runs"


def test_one_step_that_was_held_up_changes_little_and_faster_ones_are_believed() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.learn(17, 0.1, times=1)
    device.launch(17)
    assert device.pace.next_decision_at() < device.now + 0.0048 - LEAD_S
    device.run(0.0036)
    device.learn(17, 0.0036, times=3)
    device.launch(17)
    assert device.pace.next_decision_at() < device.now + 0.0038 - LEAD_S


def test_the_end_of_any_step_is_expected_by_what_its_like_took() -> None:
    device = Device()
    assert device.clock.ends_at() == 0.0
    device.learn(8192, 0.2)
    device.launch(8192)
    assert device.clock.ends_at() == pytest.approx(device.now + 0.2)


def test_steps_that_take_the_host_longer_are_decided_sooner() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.host_s = 0.0025
    device.learn(81, 0.0062)
    device.launch(81)
    assert device.pace.next_decision_at() == pytest.approx(device.now + 0.0062 - 0.0025 - SPARE_S)


def test_one_decision_that_was_held_up_changes_little() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.host_s = 0.02
    device.learn(17, 0.0046, times=1)
    device.host_s = HOST_S
    device.launch(17)
    assert device.pace.next_decision_at() > device.now + 0.0046 - LEAD_S - 0.0001


def test_a_step_whose_end_was_seen_late_lets_the_next_one_end_no_later() -> None:
    device = Device()
    device.learn(17, 0.0046)
    device.launch(17)
    device.launch(17)
    began = device.now
    device.run(0.0046 + 0.003, step_id=device.num_launched - 2)
    assert device.clock.ends_at() < began + 2 * 0.0046 + 0.0005
    device.run(0.0016)
    device.launch(17)
    assert device.clock.ends_at() > device.now + 0.0040, "nor was that one so much faster"


def test_a_host_that_is_held_up_often_decides_at_once() -> None:
    device = Device()
    device.learn(17, 0.0046)
    for _ in range(8):
        device.learn(17, 0.0086, times=1)
    device.launch(17)
    assert device.pace.next_decision_at() < device.now
    device.run(0.0046)
    device.learn(17, 0.0046)
    device.launch(17)
    assert device.pace.next_decision_at() > device.now, "when that is over, late again"


def test_steps_that_take_the_device_longer_are_not_the_hosts_fault() -> None:
    device = Device()
    device.learn(17, 0.0046)
    for _ in range(8):
        device.launch(17)
        device.now += 0.0076
        device.clock.seen_running()
        device.run(0.001)
    device.launch(17)
    assert device.pace.next_decision_at() > device.now
