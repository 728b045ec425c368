"""What is promised to streams bounds the prompt work beside them (docs/deadlines.md). The device's time is made up."""

from __future__ import annotations

from typing import Any

import pytest
from timed_device import Device

from tandem.engine.contracts.rate import AIMED_AT
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.engine.scheduling.times import prompt_budget
from tandem.engine.scheduling.times.prompt_budget import PromptBudget


def crowd(device: Device, targets: Targets = NO_TARGETS) -> None:
    """One stream, then prompts without end beside it."""
    device.harness.add("stream", [1, 2, 3], max_tokens=50, targets=targets)
    device.step()
    for number in range(60):
        device.harness.add(f"p{number}", range(number, number + 40), max_tokens=1)
        device.step()


@pytest.mark.parametrize("target_ms", [12, 20, 40])
def test_streams_keep_their_time_beside_prompts(target_ms: float) -> None:
    device = Device(tpot_target_ms=target_ms)
    crowd(device)
    assert device.tpot_s("stream") <= target_ms / 1e3 * 1.05
    assert device.tpot_s("stream") >= target_ms / 1e3 * 0.8, "time that streams have to spare goes to prompts"


def test_no_step_is_launched_for_few_tokens_again_and_again() -> None:
    """A launch takes longer than the target: prompts pass in few steps, and the stream keeps its time."""
    device = Device(launch_s=0.030, tpot_target_ms=25)
    crowd(device)
    assert device.tpot_s("stream") <= 0.025 * 1.05
    assert len(device.harness.finished) > 10, "prompts get on"


def test_a_stream_that_is_ahead_lets_a_long_chunk_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_budget, "SHORT_TOKENS", 61)  # prompts of 512 would be too long here
    device = Device(tpot_target_ms=30)
    device.harness.add("stream", [1, 2, 3], max_tokens=60)
    for _ in range(20):
        assert device.step() <= 3
    device.harness.add("p", range(62), max_tokens=1)
    assert device.step() > 60, "20 tokens at 5 ms each are half a second ahead of their time"


def test_parts_of_short_prompts_make_no_gap_longer_than_the_time_a_token() -> None:
    """Their parts are rows of the graph that runs the stream: no launch is worth waiting for slack."""
    device = Device(tpot_target_ms=30)
    device.harness.add("stream", [1, 2, 3], max_tokens=60)
    for _ in range(20):
        device.step()
    for number in range(3):
        device.harness.add(f"p{number}", range(number, number + 62), max_tokens=1)
    for _ in range(12):
        device.step()
    assert device.largest_gap_s("stream") <= 0.030 * AIMED_AT + 1e-9, "whatever the stream has gathered"
    assert device.largest_gap_s("stream") > 0.025, "prompts have all of a token's time"
    assert all((f"p{number}", 0) in device.harness.finished for number in range(3))


def test_where_streams_leave_little_slack_is_spent_on_a_few_rows_at_once() -> None:
    """Six streams have 2 ms a step left, and 4 tokens are the least: 14 ms, where all 40 of the prompt take 50."""
    device = Device(tpot_target_ms=13)
    for number in range(6):
        device.harness.add(f"stream{number}", [1, 2, number], max_tokens=60)
    for _ in range(20):
        device.step()
    device.harness.add("p", range(40), max_tokens=1)
    for _ in range(36):
        device.step()
    assert ("p", 0) in device.harness.finished
    for number in range(6):
        assert device.largest_gap_s(f"stream{number}") <= 0.014 + 1e-9
        assert device.tpot_s(f"stream{number}") <= 0.013


@pytest.mark.parametrize("asked", [{"mode": "prefill"}, {"num_prompt_logprobs": 1}])
def test_a_stream_that_is_ahead_lets_pass_what_is_launched_anyway(asked: dict[str, Any]) -> None:
    """What is pushed, or told of token by token, is launched layer by layer, however few tokens it has."""
    device = Device(tpot_target_ms=30)
    device.harness.add("stream", [1, 2, 3], max_tokens=60)
    for _ in range(20):
        device.step()
    device.harness.add("p", range(62), max_tokens=1, **asked)
    assert device.step() > 60


def test_a_node_says_what_parts_of_short_prompts_take_beside_its_streams() -> None:
    """Not what gathering for a launch would take, by rates of the very parts that show the streams' time."""
    device = Device(tpot_target_ms=15)
    budget = PromptBudget(device.state.options, 4, device.clock, device.state.step_times)
    device.harness.add("stream", [1, 2, 3], max_tokens=60)
    for number in range(20):
        device.harness.add(f"p{number}", range(number, number + 40), max_tokens=1)
        device.step()
    (stream,) = [each for each in device.state.queues.running if each.key.request_id == "stream"]
    num_rows = budget.beside([stream], device.state.queues.waiting)
    assert num_rows == 9, "of 14.25 ms the step and the stream take 5"
    assert budget.s_per_token([stream]) == pytest.approx(0.014 / num_rows)


def test_no_gap_is_longer_than_promised() -> None:
    device = Device(tpot_target_ms=30, itl_max_ms=26)
    crowd(device)
    assert device.largest_gap_s("stream") <= 0.026 + 1e-9
    assert device.largest_gap_s("stream") > 0.020, "prompts have what is left"


def test_late_streams_do_not_starve_prompts() -> None:
    """More is promised than the node can give: 8 ms a token are 4 tokens beside a decode."""
    device = Device(tpot_target_ms=8)
    device.harness.add("stream", [1, 2, 3], max_tokens=50)
    device.step()
    device.now += 10  # something else took the device
    device.harness.add("p", range(60), max_tokens=1)
    for _ in range(40):
        device.step()
    assert ("p", 0) in device.harness.finished


def test_what_a_request_is_promised_comes_before_what_the_node_promises() -> None:
    gaps = []
    for itl_max_s in (0.0, 0.012):
        device = Device(tpot_target_ms=40)
        crowd(device, targets=Targets(itl_max_s=itl_max_s))
        gaps.append(device.largest_gap_s("stream"))
    assert gaps[0] > 0.03
    assert gaps[1] <= 0.012 + 1e-9


def test_the_tightest_promise_goes_first() -> None:
    device = Device(tpot_target_ms=20, ttft_target_ms=300)
    device.harness.add("busy", range(64), max_tokens=1)
    device.harness.add("patient", range(1, 60), max_tokens=1)
    device.harness.add("hasty", range(2, 61), max_tokens=1, targets=Targets(ttft_s=0.15))
    for _ in range(3):
        device.step()
    assert device.times["hasty", 0][0] < device.times["patient", 0][0]


def test_time_spent_on_the_way_counts() -> None:
    device = Device(tpot_target_ms=20, ttft_target_ms=300)
    device.harness.add("busy", range(64), max_tokens=1)
    device.harness.add("new", range(1, 60), max_tokens=1)
    device.harness.add("old", range(2, 61), max_tokens=1, waited_s=0.15)
    for _ in range(3):
        device.step()
    assert device.times["old", 0][0] < device.times["new", 0][0]
