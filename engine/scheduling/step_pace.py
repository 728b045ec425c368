"""When the step after the running one should be decided. Pure.

A step that is decided when the one before it starts leaves the host all of that one's time, and lets whoever comes
meanwhile wait for two steps. Decided shortly before the running one ends, it takes them along.
"""

from __future__ import annotations

from tandem.engine.scheduling.clock import MOST, TOKENS_ALIKE, StepClock, size_of

# Tokens of the largest step after which the next is decided late. For larger ones the host takes as long as the device;
# docs/measurements.md#steps-of-few-rows.
MOST_TOKENS = 512
LEAD_SMOOTHING = 1 / 8  # a guess
# A host that is often held up needs the time that an early decision leaves it: no step is decided late while
# `StepClock.share_held_up` is above this.
MOST_HELD_UP = 0.06  # a guess
SPARE_S = 0.0005  # time to spare, beyond what the last decision and launch took; a guess
PROMPT_LEAD_S = 0.010  # from the decision of a step of prompts to its first kernels; a guess
PROMPT_ERROR = 0.08  # by how much of itself a step of prompts may be shorter than expected; a guess


class StepPace:
    """The pace of steps with decodes. It measures the host's time from a decision until the device has the step."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._decided_at = 0.0
        self._newest_size = 0
        self._leads: dict[int, float] = {}  # from a decision to the device, by size

    def decided(self) -> None:
        """Notes that a step is about to be planned."""
        self._decided_at = self._clock.now()

    def guessed(self, seconds: float) -> None:
        """Notes for how long the device guessed what the planned step is to check: that time is not the host's."""
        self._decided_at += seconds

    def executed(self, num_tokens: int) -> None:
        """Notes that the device has the step that was planned last."""
        self._newest_size = size = size_of(num_tokens)
        seconds = self._clock.now() - self._decided_at
        known = self._leads.setdefault(size, seconds)
        self._leads[size] = known + LEAD_SMOOTHING * (min(seconds, known * MOST) - known)

    @property
    def lead_s(self) -> float:
        """What the host takes from a decision until the device has the step; 0: not known."""
        return self._leads.get(self._newest_size, 0.0)

    def next_decision_at(self, late_s: float = 0.0) -> float:
        """When to decide the next step, in seconds of the clock; a time in the past means now. `late_s` asks for a time
        later than the best one by that much; the step then begins later, but by less."""
        running = self._clock.running
        if running is None:
            return 0.0
        is_unsure = self._clock.share_held_up > MOST_HELD_UP or self._newest_size not in self._leads
        if is_unsure or running.size * TOKENS_ALIKE > MOST_TOKENS:
            return 0.0
        lead_s = self._leads[self._newest_size]  # what comes next is mostly like the newest
        return self._clock.ends_at() - lead_s - SPARE_S + late_s


def next_prompt_decision_at(clock: StepClock) -> float:
    """When the next of steps that are prompts alone must be decided at the latest, so that the device does not wait for
    it; a time in the past means now. Deciding sooner only delays prompts that come meanwhile and should go first."""
    running = clock.running
    if running is None:
        return 0.0
    return clock.began_at() + clock.seconds_of(running) * (1 - PROMPT_ERROR) - PROMPT_LEAD_S
