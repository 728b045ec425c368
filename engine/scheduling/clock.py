"""What the device has been given, how long steps take, and so when it will be free. Pure: the clock is passed in.

Whoever asks when the running step ends asks here: the order of prompts, the decision of the next step, the loop.
Two others look on. `StepTimes` (times/step_times.py) bounds what a step may take: a table measured at start which
serving only makes slower, since a step that is too long makes streams wait; what is expected here learns faster steps
sooner, since a device that is done too soon idles. `TurnTimes` (turn_times.py) explains the host's time in metrics and
decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tandem.engine.contracts.rate import Rate

# Prompt tokens that one measurement covers at least: smaller steps, whose time is mostly launches, add up; a guess.
MEASURED_TOKENS = 1024
TOKENS_ALIKE = 16  # tokens by which sizes of steps differ, about as the sizes of captured steps do; a guess
# Guesses: the share of a difference that is learned from a faster or a slower step. Faster ones are learned sooner,
# since a decision that comes too late leaves the device idle.
FASTER, SLOWER = 0.5, 1 / 16
# Guesses: a step that took less or more than these multiples of the known time was read late, or the one before was.
LEAST, MOST = 0.8, 1.25
LATE_S = 0.0003  # a step that is read more than this after its expected end ended unseen; a guess
HELD_UP_S, MEMORY = 0.0015, 1 / 64  # guesses: lateness by which the host was held up; weight of the newest such step


def size_of(num_tokens: int) -> int:
    """The size class of a step, in units of TOKENS_ALIKE. Steps of one size are taken to last equally long."""
    return -(-num_tokens // TOKENS_ALIKE)


class RunningStep(NamedTuple):
    """A launched step: when it was launched, in seconds of the clock, and how many tokens it has."""

    launched_at: float
    num_tokens: int
    num_prompt_tokens: int

    @property
    def size(self) -> int:
        return size_of(self.num_tokens)

    @property
    def is_prompts_alone(self) -> bool:
        return self.num_prompt_tokens == self.num_tokens


class StepClock:
    """Follows launched steps. Times are seconds of `now`; "the past" is 0.0. A step begins when it is launched
    or, behind another one, when that one ends."""

    def __init__(
        self, now: Callable[[], float], *, by_size: bool = True, measured_tokens: int = MEASURED_TOKENS
    ) -> None:
        """With `by_size` a step is expected to take what earlier ones of its size took, which suits decodes, but for
        long ones of prompts alone: the more a chunk attends to the longer it takes, and of steps of one size the
        fastest count most. Else a step takes what its prompt tokens take, since hardly two chunks of prompts are
        equally long. `measured_tokens`: the least number of prompt tokens over which their time is measured."""
        self.now = now
        self.prompt_rate = Rate()
        self.share_held_up = 0.0  # share of the last steps that ended long before they were read; only `by_size`
        self._by_size = by_size
        self._measured_tokens = measured_tokens
        self._alone_rate = Rate()  # of long steps of prompts alone; only `by_size`
        self._gathered = (0, 0.0)  # prompt tokens of small steps, and what those took
        self._seconds: dict[int, float] = {}  # size -> expected seconds of a step
        self._steps: dict[int, RunningStep] = {}  # launched and not read, by step id
        self._last_completed = 0.0  # when the last step was read
        self._free_at = 0.0  # when the step that was read last is believed to have ended
        self._seen_running_at = 0.0

    @property
    def running(self) -> RunningStep | None:
        """The oldest step that has not been read."""
        return next(iter(self._steps.values()), None)

    @property
    def seconds_per_token(self) -> float:
        """The measured seconds of a prompt token; 0: nothing measured."""
        return self.prompt_rate.seconds

    def seconds_of(self, step: RunningStep) -> float:
        """The seconds that `step` is expected to take; 0: not known."""
        if not self._by_size:
            return step.num_prompt_tokens * self.seconds_per_token
        if self._is_long_prompt(step):
            return step.num_prompt_tokens * self._alone_rate.seconds
        return self._seconds.get(step.size, 0.0)

    def _is_long_prompt(self, step: RunningStep) -> bool:
        return step.is_prompts_alone and step.num_prompt_tokens >= self._measured_tokens

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
        """Notes a step that is certain and goes to the device next."""
        self._steps[step_id] = RunningStep(self.now(), num_tokens, num_prompt_tokens)

    def seen_running(self) -> None:
        """Notes that the step to be read next still runs. If it is late by now, the device is slow and not the host."""
        self._seen_running_at = self.now()

    def completed(self, step_id: int, may_wait: bool = False) -> float:
        """Notes that a step's results were read, in the order of steps. Returns the seconds that it took, which say
        little of this node where it `may_wait` for others."""
        expected_begin = self.began_at()
        step = self._steps.pop(step_id)
        now = self.now()
        seconds = now - max(step.launched_at, self._last_completed)
        self._last_completed = self._free_at = now
        if may_wait and self.prompt_rate.seconds:  # else it is better than nothing
            return seconds
        self._measure_prompt(step.num_prompt_tokens, seconds)
        if self._by_size and self._is_long_prompt(step):
            self._alone_rate.measured(step.num_prompt_tokens, seconds)
        elif self._by_size:
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
