"""How many of the guessed tokens a step should check: those that make its expected tokens a second the most. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

FIRST_CHANCE = 0.6  # that a draft is right of a sequence that has had none; a guess
LEARNED = 1 / 8  # the share of what is known of a sequence that one more draft replaces; a guess
# The share of the way back to the first chance that each step without drafts goes, so that what once failed is tried
# again; a guess.
FORGOTTEN = 1 / 64
# Where no step has been measured: rows up to so many cost nothing, and a draft must be right so often. Guesses.
FREE_ROWS, LEAST_CHANCE = 64, 0.2
# By so much drafts must promise to be faster, since what is expected of them is learned while they are had. A guess: 64
# streams whose drafts promised to pay were up to 7 % slower by them (docs/measurements.md#an-eagle-head).
LEAST_GAIN = 1.05

# The weight of the newest turn in what is known of how long they take, and the share of the way back to what was
# expected that each step without drafts goes for those with some: so they are tried again. Guesses.
NEWEST_TURN, TURN_FORGOTTEN = 1 / 16, 1 / 4096
MOST_SLOWNESS = 3.0  # most that one turn counts: beyond it something else took the time; a guess


class TurnLengths:
    """How much longer turns of the step loop take than expected. What steps take was measured alone; serving adds to
    it, and more to steps with drafts: their host reads every row before the next step can be decided."""

    def __init__(self) -> None:
        self._with_drafts = self._without = 1.0

    @property
    def slowness(self) -> float:
        """The factor by which turns with drafts take longer, beside others, than they were expected to; 1 at least."""
        return max(1.0, self._with_drafts / self._without)

    def learn(self, has_drafts: bool, expected_s: float, seconds: float) -> None:
        """Takes in a turn: from the results of the step before to those of this one."""
        ratio = min(MOST_SLOWNESS, seconds / expected_s)
        if has_drafts:
            self._with_drafts += NEWEST_TURN * (ratio - self._with_drafts)
        else:
            self._without += NEWEST_TURN * (ratio - self._without)
            self._with_drafts += TURN_FORGOTTEN * (self._without - self._with_drafts)


class Acceptance:
    """How likely the next draft of a sequence is right if all before it are."""

    __slots__ = ("chance",)

    def __init__(self) -> None:
        self.chance = FIRST_CHANCE

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in one step: what comes after the first wrong draft says nothing."""
        for index in range(min(num_drafts, num_accepted + 1)):
            self.chance += LEARNED * ((index < num_accepted) - self.chance)

    def forget(self) -> None:
        self.chance += FORGOTTEN * (FIRST_CHANCE - self.chance)


def num_worthwhile(
    chances: Sequence[Sequence[float]],
    num_tokens: int,
    num_streams: int,
    most: int,
    seconds_of: Callable[[int], float] | None,
    stall_s: float,
    guess_s: float = 0.0,
    slowness: float = 1.0,
) -> list[int]:
    """How many of each sequence's drafts a step should have beside its `num_tokens` tokens, `most` in all.

    `chances[i][j]`: that draft j of sequence i is right and all before it, never rising with j. `num_streams`: tokens
    that the step yields without drafts. `seconds_of`: what a step of so many tokens takes, None: not known. `stall_s`:
    what the host takes for a step. Behind a step with drafts the device waits for it; other steps are launched ahead,
    but no more often than the host makes one. `guess_s`: what it takes before the step to guess one more token, of
    however many sequences. `slowness`: by which factor steps with drafts take longer than all that says.
    """
    heap = [(-row[0], index, 0) for index, row in enumerate(chances) if row]
    heapq.heapify(heap)
    order: list[int] = []  # whose draft comes next, the likeliest first
    best, expected, deepest = 0, float(num_streams), 0
    best_rate = 0.0 if seconds_of is None else LEAST_GAIN * expected / max(seconds_of(num_tokens), stall_s)
    while heap and len(order) < most:
        chance, index, place = -heap[0][0], heap[0][1], heap[0][2] + 1
        order.append(index)
        expected, deepest = expected + chance, max(deepest, place)
        if place < len(chances[index]):
            heapq.heapreplace(heap, (-chances[index][place], index, place))
        else:
            heapq.heappop(heap)
        if seconds_of is None:
            if chance < LEAST_CHANCE or num_tokens + len(order) > FREE_ROWS:
                break
            best = len(order)
        else:
            rate = expected / (slowness * (seconds_of(num_tokens + len(order)) + stall_s + deepest * guess_s))
            if rate > best_rate:
                best, best_rate = len(order), rate
    counts = [0] * len(chances)
    for index in order[:best]:
        counts[index] += 1
    return counts
