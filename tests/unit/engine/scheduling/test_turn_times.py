"""A step that took too long is counted under what took the time."""

from __future__ import annotations

import pytest

from tandem.engine.contracts.wire.durations import bucket_keys
from tandem.engine.scheduling.step import SampleRow, ScheduledRow, SchedulerOutput
from tandem.engine.scheduling.turn_times import PARTS, TurnTimes

SLOW_S = 0.007
USUAL = {"events": 0.0002, "upkeep": 0.0001, "schedule": 0.0003, "launch": 0.0006, "device": 0.003, "results": 0.0002}


class Turns:
    """A step loop that says what it does, on a clock of its own."""

    def __init__(self) -> None:
        self.now = self.cpu = 50.0
        self.notes: list[dict] = []
        self.times = TurnTimes(SLOW_S, lambda: self.now, lambda: self.cpu, self.notes.append, (4, 1024))

    def turn(self, num_prompt_tokens: int = 0, **parts: float) -> None:
        for part in PARTS[:-1]:
            seconds = parts.get(part, USUAL.get(part, 0.0))
            self.now += seconds
            self.cpu += 0.0 if part == "device" else min(seconds, 0.001)
            self.times.charge(part)
        self.now += parts.get("results", USUAL["results"])
        rows = [ScheduledRow(0, 100, 1)]
        if num_prompt_tokens:
            rows.append(ScheduledRow(1, 0, num_prompt_tokens))
        self.times.step_read(SchedulerOutput(0, tuple(rows), (SampleRow(0, 0, 101, 0, 5),)))

    def usual(self) -> Turns:
        for _ in range(200):
            self.turn()
        return self


def test_nothing_is_counted_while_steps_take_their_time() -> None:
    turns = Turns().usual()
    counted = [turns.times.counters.get(key, 0) for key in bucket_keys("step_s")]
    assert sum(counted) == 199, "the first follows nothing"
    assert turns.times.counters["slow_steps"] == 0
    assert not turns.notes


# README says: "`/metrics` says why steps were slow"
@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_took_longer_than_usual_is_the_reason(part: str) -> None:
    turns = Turns().usual()
    turns.turn(**{part: 0.009})
    assert turns.times.counters["slow_steps"] == turns.times.counters[f"slow_steps_{part}"] == 1


def test_the_device_is_waited_for_as_ever_and_not_the_reason_for_what_the_host_did() -> None:
    turns = Turns().usual()
    turns.turn(launch=0.004)
    assert turns.times.counters["slow_steps_launch"] == 1
    assert turns.notes[0]["device"] == 3.0, "and was less than its usual time beside the rest"
    assert turns.notes[0]["total"] == pytest.approx(7.8, abs=0.01)
    assert turns.notes[0]["cpu"] == pytest.approx(1.6, abs=0.01), "it waited for the rest"


def test_device_time_of_a_step_with_prompt_work_is_the_prompts() -> None:
    turns = Turns().usual()
    turns.turn(num_prompt_tokens=512, device=0.012)
    assert turns.times.counters["slow_steps_prompt"] == 1
    said = {"prompt_tokens": 512, "rows": 2, "chunks": 1, "place": 256, "context": 101}
    assert said.items() <= turns.notes[0].items()


def test_time_in_which_nobody_waited_counts_for_no_step() -> None:
    turns = Turns().usual()
    turns.times.paused()
    turns.turn(events=60.0)
    assert turns.times.counters["slow_steps"] == 0
    turns.turn(device=0.02)
    assert turns.times.counters["slow_steps_device"] == 1


def test_sums_are_over_all_steps_and_leave_idle_time_out() -> None:
    turns = Turns()
    turns.turn(schedule=0.002)
    turns.times.paused()
    turns.now += 60.0
    turns.times.charge("events")
    turns.turn(num_prompt_tokens=512, schedule=0.004, launch=0.001)
    turns.now += 60.0
    turns.times.restart()
    turns.turn(events=0.001)
    counters = turns.times.counters
    assert (counters["steps_read"], counters["step_rows"], counters["step_tokens"]) == (3, 4, 515)
    assert counters["batch_fill"] == pytest.approx(1 / 4 + 513 / 1024 + 1 / 4), "by rows or tokens, whichever is more"
    assert counters["turn_schedule_s"] == pytest.approx(0.0063)
    assert counters["turn_events_s"] == pytest.approx(0.0), "no step followed another"
    turns.turn(events=0.001)
    assert counters["turn_events_s"] == pytest.approx(0.001)
