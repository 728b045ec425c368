"""Whether steps with drafts make more tokens a second than steps without, as the loop's turns show. Pure.

Time is counted in turns: what a turn of as many streams takes without drafts. A turn is from the results of one step to
those of the next, so it has whatever the step costs: rows, guesses, and a device that waits while the host reads, looks
up, plans and launches.
"""

from __future__ import annotations

# Drafts may lose this share of all time, and no more is spent on trying them again where they lose.
MOST_LOST = 1 / 128
# What drafts may lose before they cease: at first, when they are tried again, and at most, however much they gained
# before. Guesses.
FIRST_CREDIT, MOST_CREDIT = 1.0, 8.0
# Steps in a row without drafts that say how long such take, and with drafts before that is measured again. Guesses.
PLAIN_STEPS, STEPS_BETWEEN = 6, 512
NEWEST_TURN = 1 / 8  # the weight of the newest turn in what is known of how long they take; a guess
MOST_SLOWNESS = 3.0  # most that one turn counts: beyond it something else took the time; a guess


class Gain:
    """What drafts gain in steps of about so many streams. They come in stretches: until they have lost their credit, or
    how long turns without them take has to be measured again. The next begins when what this one lost is small beside
    the time since."""

    def __init__(self) -> None:
        self._has_drafts = False
        self._num_steps = 0  # of this stretch, with drafts or without
        # By which turns without drafts take longer than their steps, and of how many: 0.0, 0: none has been seen.
        self._slowness, self._num_plain = 0.0, 0
        self.stall_s = 0.0  # for which the device waits behind a step with drafts
        self._credit, self._gained = FIRST_CREDIT, 0.0  # `_gained`: by the newest stretch with drafts, all in all

    def begin_step(self, stall_s: float) -> tuple[bool, int]:
        """Says whether the next step may have drafts and, at the start of a stretch with drafts, behind how many steps
        without; else 0. `stall_s`: the wait behind a step with drafts as it is believed before one is seen, for a
        stretch that begins."""
        num_without = 0
        if self._has_drafts:
            if self._credit <= 0 or self._num_steps >= STEPS_BETWEEN:
                self._has_drafts, self._num_steps = False, 0
                self._credit = max(self._credit, FIRST_CREDIT)
        elif self._slowness and self._num_steps >= PLAIN_STEPS + max(0.0, -self._gained) / MOST_LOST:
            num_without = self._num_steps
            self._has_drafts, self._num_steps, self._gained, self.stall_s = True, 0, 0.0, stall_s
        self._num_steps += 1
        return self._has_drafts, num_without

    def plain_s(self, step_s: float) -> float:
        """What a turn without drafts takes whose step takes `step_s` alone."""
        return step_s * self._slowness

    def learn_plain(self, step_s: float, seconds: float) -> None:
        """Takes in a turn without drafts that follows another."""
        ratio = seconds / step_s
        known = self._slowness or ratio
        self._num_plain += 1
        weight = max(NEWEST_TURN, 1 / self._num_plain)  # at first their mean: no turn counts for more than another
        self._slowness = known + weight * (min(ratio, MOST_SLOWNESS * known) - known)

    def learn_stall(self, seconds: float) -> None:
        """Takes in by how much a turn with drafts was longer than what the device had to do."""
        self.stall_s += NEWEST_TURN * (max(0.0, seconds) - self.stall_s)

    def learn(self, tokens: float, step_s: float, seconds: float, is_usual: bool) -> None:
        """Takes in a turn of a step that had drafts or might have had, or the one behind them. `tokens`: that it made,
        for each stream. `is_usual` False: those that follow are not like it."""
        gained = tokens - min(seconds / self.plain_s(step_s), MOST_SLOWNESS)
        self._gained += gained
        if is_usual:
            self._credit = min(MOST_CREDIT, self._credit + gained + MOST_LOST)
