"""What the device has been given, how long steps take, and so when it will be free. Pure: the clock is passed in.

Whoever asks when the running step ends asks here: the order of prompts, the decision of the next step, the loop.
Two others look on. `StepTimes` (step_times.py) bounds what a step may take: a table measured at start which serving
only makes slower, since a step that is too long makes streams wait; what is expected here learns faster steps sooner,
since a device that is done too soon idles. `TurnTimes` (turn_times.py) explains the host's time in metrics and decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tandem.engine.contracts.rate import Rate

# Small steps, which tell as much about launches, count together: as much as one of so many; a guess.
MEASURED_TOKENS = 1024
TOKENS_ALIKE = 16  # steps are captured for so many rows more each; a guess
FASTER, SLOWER = 0.5, 1 / 16  # shares of a difference that are learned: a late decision leaves the device idle
LEAST, MOST = 0.8, 1.25  # of what is known: what took less or more was read late, it or the step before
LATE_S = 0.0003  # later than so long after its expected end a step ended unseen; a guess
HELD_UP_S, MEMORY = 0.0015, 1 / 64  # a step that was read so much later; of how many steps that is remembered


def size_of(num_tokens: int) -> int:
    """Steps of one size take equally long."""
    return -(-num_tokens // TOKENS_ALIKE)


class RunningStep(NamedTuple):
    launched_at: float
    num_tokens: int
    num_prompt_tokens: int

    @property
    def size(self) -> int:
        return size_of(self.num_tokens)


class StepClock:
    """Times are seconds of `now`. A step begins when it is launched or, behind another, when that one ends."""

    def __init__(
        self, now: Callable[[], float], *, by_size: bool = True, measured_tokens: int = MEASURED_TOKENS
    ) -> None:
        """`by_size`: a step is expected to take what those of its size took, as decodes do, again and again; else what
        its prompt tokens take, since hardly two chunks of prompts are equally long. `measured_tokens`: over how many a
        prompt token's time is measured at least."""
        self.now = now
        self.prompt_rate = Rate()
        self.share_held_up = 0.0  # of the last steps: ended long before they were read; known `by_size`
        self._by_size = by_size
        self._measured_tokens = measured_tokens
        self._gathered = (0, 0.0)  # prompt tokens of small steps, and what those took
        self._seconds: dict[int, float] = {}  # of a step, by size
        self._steps: dict[int, RunningStep] = {}  # launched and not read
        self._last_completed = 0.0  # read
        self._free_at = 0.0  # when the step that was read last is believed to have ended
        self._seen_running_at = 0.0

    @property
    def running(self) -> RunningStep | None:
        """The oldest step that has not been read."""
        return next(iter(self._steps.values()), None)

    @property
    def seconds_per_token(self) -> float:
        """What a prompt token takes, measured; 0: nothing measured."""
        return self.prompt_rate.seconds

    def seconds_of(self, step: RunningStep) -> float:
        """What `step` is expected to take; 0: not known."""
        if self._by_size:
            return self._seconds.get(step.size, 0.0)
        return step.num_prompt_tokens * self.seconds_per_token

    def began_at(self) -> float:
        """When the running step began; the past if none runs."""
        return 0.0 if self.running is None else max(self.running.launched_at, self._free_at)

    def ends_at(self) -> float:
        """When the running step is expected to end; the past when that is not known."""
        return 0.0 if self.running is None else self.began_at() + self.seconds_of(self.running)

    def busy_until(self) -> float:
        """When the device will have done what it was given, now at the earliest: a step that runs can't be stopped."""
        return max(self.now(), self.began_at() + sum(map(self.seconds_of, self._steps.values())))

    def launched(self, step_id: int, num_tokens: int, num_prompt_tokens: int) -> None:
        """A step is certain and goes to the device next."""
        self._steps[step_id] = RunningStep(self.now(), num_tokens, num_prompt_tokens)

    def seen_running(self) -> None:
        """The step that is read next has not ended: if it is late by now, it's the device that takes longer."""
        self._seen_running_at = self.now()

    def completed(self, step_id: int) -> float:
        """Seconds that the step took. Its results have been read, in the order of steps."""
        expected_begin = self.began_at()
        step = self._steps.pop(step_id)
        now = self.now()
        seconds = now - max(step.launched_at, self._last_completed)
        self._last_completed = self._free_at = now
        self._measure_prompt(step.num_prompt_tokens, seconds)
        if self._by_size:
            self._learn_size(step.size, seconds, expected_begin)
        return seconds

    def _learn_size(self, size: int, seconds: float, expected_begin: float) -> None:
        now = self._last_completed
        known = self._seconds.setdefault(size, seconds)
        self._free_at = min(now, expected_begin + known + LATE_S)
        is_held_up = now > max(expected_begin + known, self._seen_running_at) + HELD_UP_S
        self.share_held_up += MEMORY * (is_held_up - self.share_held_up)
        change = min(max(seconds, known * LEAST), known * MOST) - known
        self._seconds[size] = known + change * (SLOWER if change > 0 else FASTER)

    def _measure_prompt(self, num_tokens: int, seconds: float) -> None:
        if not num_tokens:
            return
        if num_tokens < self._measured_tokens:
            gathered, took = self._gathered
            num_tokens, seconds = gathered + num_tokens, took + seconds
            self._gathered = num_tokens, seconds
            if num_tokens < self._measured_tokens:
                return
            self._gathered = 0, 0.0
        self.prompt_rate.measured(num_tokens, seconds)
