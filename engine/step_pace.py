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
MOST_SLOWNESS = 1.25  # what took longer than that was held up by something else
SPARE_S = 0.0005  # beside what the last decision and launch took


class StepPace:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}  # of a step, by size
        self._steps: dict[int, tuple[float, int]] = {}  # launched and not read: launched at, size
        self._last_completed = 0.0
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
        self._leads[self._newest_size] = known + LEAD_SMOOTHING * (seconds - known)

    def completed(self, step_id: int) -> None:
        """Its results have been read, in the order of steps."""
        began, size = self._steps.pop(step_id)
        now = self._clock()
        seconds = now - max(began, self._last_completed)
        self._last_completed = now
        known = self._seconds.setdefault(size, seconds)
        change = min(seconds, known * MOST_SLOWNESS) - known
        self._seconds[size] = known + change * (SLOWER if change > 0 else FASTER)

    def next_decision_at(self) -> float:
        """The past: now."""
        if not self._steps:
            return 0.0
        _, size = next(iter(self._steps.values()))
        if size * TOKENS_ALIKE > MOST_TOKENS or self._newest_size not in self._leads:
            return 0.0
        return self.ends_at() - self._leads[self._newest_size] - SPARE_S  # what comes next is mostly like the newest

    def ends_at(self) -> float:
        """When the running step is expected to end; the past when that is not known."""
        if not self._steps:
            return 0.0
        began, size = next(iter(self._steps.values()))
        return max(began, self._last_completed) + self._seconds.get(size, 0.0)
