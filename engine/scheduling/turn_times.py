"""Where the time between the results of two steps went: why a token came late. Pure: the clocks are passed in.

A turn of the step loop is cut into parts, each charged with the time since the cut before. When a step's results are
there, its turn is over. One that took too long is counted under the part that exceeded its usual time by most; time of
the device counts as "prompt" when the step had prompt work.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.scheduling.step import SchedulerOutput

# What the step loop does, in the order of a turn. "device": waiting for the step that runs.
PARTS = ("events", "upkeep", "schedule", "launch", "urgent", "device", "results")
REASONS = (*PARTS, "prompt")
SUMS = ("steps_read", "step_rows", "step_tokens", "batch_fill")  # over all steps (docs/profiling.md)
SMOOTHING = 1 / 32  # a guess
Note = Callable[[dict[str, float | str]], None]


class TurnTimes:
    """Accounts of the turns of a step loop. A turn longer than `slow_s` seconds is slow, and `note` is called with it:
    its parts, `total` and `cpu` in ms, its `reason`, the rows, prompt tokens and new sequences of the step, how many of
    the rows are `chunks`, at which `place` of their prompts tokens of those stand on average, and to how many tokens,
    the `context`, the other rows attend together. `cpu` is this thread's; what the parts besides "device" exceed it by,
    the thread waited for the GIL or a core."""

    def __init__(
        self,
        slow_s: float,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        note: Note | None = None,
        most: tuple[int, int] = (1, 1),
    ) -> None:
        """`most`: the rows and tokens of a step that is full."""
        self._slow_s, self._clock, self._cpu_clock, self._note = slow_s, clock, cpu_clock, note
        self._usual = dict.fromkeys(PARTS, 0.0)
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._last = clock()
        self._cpu = cpu_clock()
        self._follows = False  # whether the turn began where another ended
        self._most_rows, self._most_tokens = most
        reasons = {f"slow_steps_{reason}": 0.0 for reason in REASONS}
        sums = dict.fromkeys((*map(_seconds_in, PARTS), *SUMS), 0.0)
        self.counters = {"step_s": 0.0, "slow_steps": 0.0, **reasons, **sums}

    def charge(self, part: str) -> None:
        """Charges the time since the last call to `part`."""
        now = self._clock()
        self._parts[part] += now - self._last
        self._last = now

    def paused(self) -> None:
        """Notes that nothing was launched: what comes next begins a turn, but nobody has waited for it."""
        self._follows = False
        self._parts = dict.fromkeys(PARTS, 0.0)

    def restart(self) -> None:
        """Leaves out what the turn took so far: it was no part of a step."""
        self._last = self._clock()
        self.paused()

    def step_read(self, step: SchedulerOutput) -> None:
        """Ends the turn of `step`, whose results are there."""
        self.charge("results")
        self._sum_up(step)
        parts, total, cpu = self._parts, sum(self._parts.values()), self._cpu_clock()
        if self._follows:
            note_duration(self.counters, "step_s", total)
            if total > self._slow_s:
                self._count(step, parts, total, cpu - self._cpu)
            else:
                for part, seconds in parts.items():
                    self._usual[part] += SMOOTHING * (seconds - self._usual[part])
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._cpu, self._follows = cpu, True

    def _sum_up(self, step: SchedulerOutput) -> None:
        """Adds a step to the sums. Before one that follows nothing, nobody waited for events."""
        for part, seconds in self._parts.items():
            if self._follows or part != "events":
                self.counters[_seconds_in(part)] += seconds
        fill = max(len(step.rows) / self._most_rows, step.num_tokens / self._most_tokens)
        for name, value in zip(SUMS, (1, len(step.rows), step.num_tokens, min(1.0, fill)), strict=True):
            self.counters[name] += value

    def _count(self, step: SchedulerOutput, parts: dict[str, float], total: float, cpu: float) -> None:
        num_prompt_tokens = max(0, step.num_tokens - len(step.samples))  # those that nobody waited for
        reason = max(PARTS, key=lambda part: parts[part] - self._usual[part])
        if reason == "device" and num_prompt_tokens:
            reason = "prompt"
        self.counters["slow_steps"] += 1
        self.counters[f"slow_steps_{reason}"] += 1
        if self._note is not None:
            in_ms = {part: round(seconds * 1e3, 2) for part, seconds in parts.items()}
            sums = {"total": round(total * 1e3, 2), "cpu": round(cpu * 1e3, 2)}
            kinds = {"rows": len(step.rows), "prompt_tokens": num_prompt_tokens, "new": len(step.new_slots)}
            self._note({"reason": reason, **sums, **in_ms, **kinds, **_places(step)})


def _places(step: SchedulerOutput) -> dict[str, int]:
    chunks = [row for row in step.rows if row.num_tokens > 1]
    places = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in chunks)
    place = round(places / max(1, sum(row.num_tokens for row in chunks)))
    context = sum(row.start + 1 for row in step.rows if row.num_tokens == 1)
    return {"chunks": len(chunks), "place": place, "context": context}


def _seconds_in(part: str) -> str:
    return f"turn_{part}_s"
