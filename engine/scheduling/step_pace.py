"""How long steps of a size take, and so when the step after the running one should be decided. Pure: the clock is
passed in.

A step that is decided when the one before it starts leaves the host all of that one's time, and lets whoever comes
meanwhile wait for two steps. Decided shortly before the running one ends, it takes them along.
"""

from __future__ import annotations

from collections.abc import Callable

TOKENS_ALIKE = 16  # steps are captured for so many rows more each
MOST_TOKENS = 512  # of a step after which the next is decided late: beyond, the host takes as long as the device
FASTER, SLOWER = 0.5, 1 / 16  # shares of a difference that are learned: a late decision leaves the device idle
LEAD_SMOOTHING = 1 / 8
LEAST, MOST = 0.8, 1.25  # of what is known: what took less or more was read late, it or the step before
LATE_S = 0.0003  # later than so long after its expected end a step ended unseen
# A host that is held up itself needs the time that an early decision leaves it: where more than this share of steps,
# lately, was seen to have ended so much later than expected, and so long after the last look, none is decided late.
HELD_UP_S, MOST_HELD_UP, MEMORY = 0.0015, 0.06, 1 / 64
SPARE_S = 0.0005  # beside what the last decision and launch took


class StepPace:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}  # of a step, by size
        self._steps: dict[int, tuple[float, int]] = {}  # launched and not read: launched at, size
        self._last_completed = self._free_at = 0.0
        self._share_held_up = 0.0
        self._seen_running_at = 0.0
        self._decided_at = 0.0
        self._newest_size = 0
        self._leads: dict[int, float] = {}  # from a decision to the device, by size

    def decided(self) -> None:
        """A step is about to be planned."""
        self._decided_at = self._clock()

    def launched(self, step_id: int, num_tokens: int) -> None:
        self._newest_size = -(-num_tokens // TOKENS_ALIKE)
        self._steps[step_id] = self._clock(), self._newest_size

    def executed(self) -> None:
        """The device has the step that was planned last."""
        seconds = self._clock() - self._decided_at
        known = self._leads.setdefault(self._newest_size, seconds)
        self._leads[self._newest_size] = known + LEAD_SMOOTHING * (min(seconds, known * MOST) - known)

    def seen_running(self) -> None:
        """The step that is read next has not ended: if it is late by now, it's the device that takes longer."""
        self._seen_running_at = self._clock()

    def completed(self, step_id: int) -> None:
        """Its results have been read, in the order of steps."""
        began, size = self._steps.pop(step_id)
        now, expected = self._clock(), max(began, self._free_at)
        seconds = now - max(began, self._last_completed)
        known = self._seconds.setdefault(size, seconds)
        self._last_completed, self._free_at = now, min(now, expected + known + LATE_S)
        is_held_up = now > max(expected + known, self._seen_running_at) + HELD_UP_S
        self._share_held_up += MEMORY * (is_held_up - self._share_held_up)
        change = min(max(seconds, known * LEAST), known * MOST) - known
        self._seconds[size] = known + change * (SLOWER if change > 0 else FASTER)

    def next_decision_at(self, late_s: float = 0.0) -> float:
        """The past: now. `late_s`: how much later than would be in time; the step begins later then, by less."""
        if not self._steps:
            return 0.0
        _, size = next(iter(self._steps.values()))
        is_unsure = self._share_held_up > MOST_HELD_UP or self._newest_size not in self._leads
        if is_unsure or size * TOKENS_ALIKE > MOST_TOKENS:
            return 0.0
        lead_s = self._leads[self._newest_size]  # what comes next is mostly like the newest
        return self.ends_at() - lead_s - SPARE_S + late_s

    def ends_at(self) -> float:
        """When the running step is expected to end; the past when that is not known."""
        if not self._steps:
            return 0.0
        began, size = next(iter(self._steps.values()))
        return max(began, self._free_at) + self._seconds.get(size, 0.0)
