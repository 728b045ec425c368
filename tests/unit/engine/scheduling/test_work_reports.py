"""What a node tells routers of its work: how it stands, and what was learned from its steps."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, Harness
from timed_device import STEP_S, TOKEN_S, Device

from tandem.engine.contracts.wire.parts import Targets
from tandem.engine.contracts.wire.work import MOST_PROMPTS, NodeReport
from tandem.engine.scheduling.ports import NoShares
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.work.trend import Trend

PROMPT = list(range(10, 50))


def report(device: Device) -> NodeReport:
    found = device.harness.scheduler.work.report()
    assert found is not None
    return found


def test_prompts_are_told_by_their_deadlines_with_what_is_left_of_them() -> None:
    device = Device()
    device.harness.add("cached", PROMPT, max_tokens=1)
    while device.step():
        pass
    device.harness.add("later", [7] * 30, targets=Targets(ttft_s=2.0))
    device.harness.add("sooner", PROMPT, targets=Targets(ttft_s=1.0))
    (sooner, first), (later, second) = report(device).prompts
    assert (sooner, later) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (first, second) == (BLOCK, 30), "all blocks but the last are cached, whose last token is computed"


def test_a_report_is_bounded() -> None:
    device = Device()
    for index in range(MOST_PROMPTS + 3):
        device.harness.add(f"r{index}", [index] * 5, targets=Targets(ttft_s=1.0 + index))
    found = report(device)
    assert [tokens for _, tokens in found.prompts] == [5] * MOST_PROMPTS
    assert found.num_more_tokens == 15


def test_streams_and_room_are_told() -> None:
    device = Device()
    device.harness.add("stream", [1, 2, 3], max_tokens=30)
    device.step()
    device.step()
    found = report(device)
    assert (found.num_streams, found.prompts) == (1, ())
    assert found.free_tokens == 399 * BLOCK
    for _ in range(20):
        device.step()
    assert report(device).step_s == pytest.approx(STEP_S + TOKEN_S, rel=0.01)


def test_a_request_whose_last_token_is_on_its_way_is_no_stream() -> None:
    device = Device()
    device.harness.add("prompt", PROMPT, max_tokens=1)
    seen = []
    while device.step():
        seen.append(report(device).num_streams)
    assert seen
    assert not any(seen)


def test_what_a_prompt_takes_is_learned_beside_streams_too() -> None:
    device = Device()
    device.harness.add("stream", [1, 2, 3], max_tokens=40)
    for _ in range(20):
        device.step()
    device.harness.add("prompt", PROMPT, max_tokens=1)
    device.step()
    assert report(device).least_s_per_token == pytest.approx(TOKEN_S, rel=0.1)


class AllChunksHere(NoShares):
    """Of a prompt that others help with, which begins alone."""

    def next_part(self, request: Request, room: int) -> tuple[int, int]:
        return request.num_computed_tokens, request.num_launched_tokens


def test_a_step_that_waits_for_other_nodes_teaches_nothing() -> None:
    """It takes as long as theirs."""
    device = Device()
    device.state.shares = AllChunksHere()
    device.harness.add("stream", [1, 2, 3], max_tokens=60)
    for _ in range(20):
        device.step()

    def compute(name: str, num_nodes: int) -> tuple[float, float]:
        request = device.harness.add(name, range(ord(name), ord(name) + 40), max_tokens=1)
        request.get_help(num_nodes)
        while request.state is not RequestState.FINISHED:
            device.step()
        return report(device).least_s_per_token, device.state.step_times.seconds(32)

    known = compute("a", 1)
    device.launch_s = 0.08  # of prompt work, some 0.05 before
    assert compute("b", 2) == known
    assert all(learned > before for learned, before in zip(compute("c", 1), known, strict=True))


def test_a_node_without_deadlines_tells_nothing() -> None:
    assert Harness().scheduler.work.report() is None


def test_a_trend_is_the_line_that_it_was_told() -> None:
    trend = Trend()
    assert trend.line == (0.0, 0.0)
    for context in (100, 5_000, 900, 30_000, 12_000):
        trend.measured(context, 2e-5 * (1 + context / 30_000), weight=1024)
    base, slope = trend.line
    assert base == pytest.approx(2e-5)
    assert slope / base == pytest.approx(1 / 30_000)
    trend.measured(1_000, 1.0)
    assert trend.at(1_000) < 1e-4, "what was held up for long counts little"


def test_a_trend_of_alike_measurements_has_no_slope() -> None:
    trend = Trend()
    for seconds in (0.010, 0.011, 0.010, 0.009):
        trend.measured(500, seconds)
    assert trend.line == (pytest.approx(0.010, rel=0.05), 0.0)
