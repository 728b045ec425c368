"""Waiting requests of higher priority take the place of running ones of lower; nobody starves."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, Harness

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.prompt_order import AGED_AFTER_S, LOOK_EVERY_S, MOST_YIELDS
from tandem.engine.scheduling.request import RequestState


def test_a_full_batch_makes_place_for_who_matters_more() -> None:
    harness = Harness(max_num_seqs=2)
    low = [harness.add(f"low{i}", [i] * 6, max_tokens=20, priority=5) for i in range(2)]
    for _ in range(4):
        harness.step()
    high = harness.add("high", [9] * 6, max_tokens=3, priority=0)
    harness.step()
    assert high.state is RequestState.RUNNING
    assert [each.num_preemptions for each in low] == [0, 1], "the one that came last gives way"
    while "high" not in {name for name, _ in harness.finished}:
        harness.step()
    assert not any(name.startswith("low") for name, _ in harness.finished)
    harness.run()
    for name in ("low0", "low1", "high"):
        harness.assert_output(name)
    harness.assert_empty()


def test_equals_wait_for_each_other() -> None:
    harness = Harness(max_num_seqs=1)
    first = harness.add("first", [1] * 6, max_tokens=10, priority=1)
    harness.step()
    harness.add("second", [2] * 6, max_tokens=2, priority=1)
    harness.add("third", [3] * 6, max_tokens=2, priority=2)
    harness.run()
    assert first.num_preemptions == 0
    assert [name for name, _ in harness.finished] == ["first", "second", "third"]


def test_blocks_come_from_less_important_ones_only_if_they_suffice() -> None:
    harness = Harness(num_blocks=8, max_num_batched_tokens=64)
    low = harness.add("low", [1] * 16, max_tokens=8, priority=5)
    even = harness.add("even", [3] * 8, max_tokens=8, priority=0)
    for _ in range(3):
        harness.step()
    large = harness.add("large", [2] * 28, max_tokens=2, priority=0)  # more than low has beside what is free
    harness.step()
    assert (low.num_preemptions, large.state) == (0, RequestState.WAITING)
    small = harness.add("small", [4] * 14, max_tokens=2, priority=-1)
    harness.step()
    assert (low.num_preemptions, even.num_preemptions) == (1, 0)
    assert small.state is RequestState.RUNNING
    harness.run()
    for name in ("low", "even", "large", "small"):
        harness.assert_output(name)
    harness.assert_empty()


def test_a_committed_prompt_that_matters_more_need_not_wait_for_a_slot() -> None:
    """On a decode node: its KV has come."""
    harness = Harness(max_num_seqs=1)
    low = harness.add("low", [1] * 6, max_tokens=30, priority=5)
    for _ in range(3):
        harness.step()
    prompt = [7] * 8
    high = harness.request("high", prompt, mode="decode", max_tokens=3, priority=0)
    blocks = harness.pool.allocate_grantable(2)
    assert blocks is not None
    for position in range(len(prompt)):
        harness.runner.memory[blocks[position // BLOCK]][position % BLOCK] = tuple(prompt[: position + 1])
    harness.commit(high, blocks)
    harness.step()
    assert (high.state, low.num_preemptions) == (RequestState.RUNNING, 1)
    harness.run()
    harness.assert_output("low")
    harness.assert_output("high")


def test_who_gave_way_often_enough_runs_to_its_end() -> None:
    harness = Harness(max_num_seqs=1)
    low = harness.add("low", [1] * 6, max_tokens=30, priority=5)
    for turn in range(8 * (MOST_YIELDS + 1)):
        harness.step()
        if turn % 8 == 4:
            last = harness.add(f"high{turn}", [turn] * 6, max_tokens=2, priority=0)
    assert (low.num_yields, last.was_started) == (MOST_YIELDS, False)
    harness.run()
    harness.assert_output("low")


def test_who_waited_long_goes_first() -> None:
    """A stream of others that matter more never ends."""
    now = 0.0
    harness = Harness(max_num_seqs=1, clock=StepClock(lambda: now))
    harness.add("high", [1] * 6, max_tokens=4, priority=0)
    harness.step()
    low = harness.add("low", [2] * 6, max_tokens=4, priority=9)
    for turn in range(30):
        harness.add(f"high{turn}", [turn] * 6, max_tokens=4, priority=0)
    for _ in range(12):
        harness.step()
    assert not low.was_started
    now = AGED_AFTER_S + LOOK_EVERY_S
    while ("low", 0) not in harness.finished:
        harness.step()
    assert len(harness.finished) < 12, "it went before the others"
    harness.run()
    harness.assert_empty()


@pytest.mark.parametrize("mode", ["prefill", "paused"])
def test_what_is_handed_off_gives_way_to_nobody(mode: str) -> None:
    harness = Harness(max_num_seqs=1)
    if mode == "prefill":
        low = harness.add("low", range(60), mode="prefill", max_tokens=9, priority=5)
    else:
        low = harness.add("low", [1] * 6, max_tokens=9, priority=5)
    harness.step()
    if mode == "paused":
        low.pause()
    high = harness.add("high", [1] * 6, max_tokens=2, priority=0)
    harness.step()
    assert (low.num_preemptions, high.state) == (0, RequestState.WAITING)
    low.resume()
