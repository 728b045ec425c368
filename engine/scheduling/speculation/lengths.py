"""How many of the guessed tokens a step should check: those that make its expected tokens a second the most. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

FIRST_CHANCE = 0.6  # that a draft is right of a sequence that has had none; a guess
LEARNED = 1 / 8  # the share of what is known of a sequence that one more draft replaces; a guess
# The share of the way back to the first chance that each step without drafts goes, so that what once failed is tried
# again; a guess.
FORGOTTEN = 1 / 64
# Where no step has been measured: rows up to so many cost nothing, and a draft must be right so often. Guesses.
FREE_ROWS, LEAST_CHANCE = 64, 0.2


class Costs(NamedTuple):
    """What a turn of the step loop takes, in seconds."""

    plain_s: float  # without drafts
    step_s: Callable[[int], float]  # a step of so many tokens, alone
    stall_s: float  # for which the device waits for the host behind a step with drafts
    guess_s: float  # for each token of the longest guess, of however many sequences, before the step

    def of_step(self, num_tokens: int, num_guesses: int) -> float:
        """What the device has to do."""
        return self.step_s(num_tokens) + num_guesses * self.guess_s


class Acceptance:
    """How likely the next draft of a sequence is right if all before it are."""

    __slots__ = ("chance",)

    def __init__(self) -> None:
        self.chance = FIRST_CHANCE

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in one step: what comes after the first wrong draft says nothing."""
        for index in range(min(num_drafts, num_accepted + 1)):
            self.chance += LEARNED * ((index < num_accepted) - self.chance)

    def forget(self, num_steps: int = 1) -> None:
        """Takes in so many steps without drafts."""
        self.chance = FIRST_CHANCE + (1 - FORGOTTEN) ** num_steps * (self.chance - FIRST_CHANCE)


def num_worthwhile(
    chances: Sequence[Sequence[float]],
    num_tokens: int,
    num_streams: int,
    most: int,
    costs: Costs | None,
) -> list[int]:
    """How many of each sequence's drafts a step should have beside its `num_tokens` tokens, `most` in all.

    `chances[i][j]`: that draft j of sequence i is right and all before it, never rising with j. `num_streams`: tokens
    that the step yields without drafts. `costs` None: not known.
    """
    # The likeliest first, and so each sequence's in their order.
    drafts = sorted(
        [(-chance, index, place) for index, row in enumerate(chances) for place, chance in enumerate(row, 1)]
    )
    best, expected, deepest = 0, float(num_streams), 0
    best_rate = 0.0 if costs is None else expected / costs.plain_s
    beside_s = 0.0  # what a turn takes beside its step
    for num, (chance, _, place) in enumerate(drafts[:most], 1):
        expected -= chance
        if costs is None:
            if -chance < LEAST_CHANCE or num_tokens + num > FREE_ROWS:
                break
            best = num
            continue
        if place > deepest:
            deepest, beside_s = place, costs.stall_s + place * costs.guess_s
        rate = expected / (costs.step_s(num_tokens + num) + beside_s)
        if rate > best_rate:
            best, best_rate = num, rate
    counts = [0] * len(chances)
    for _, index, _ in drafts[:best]:
        counts[index] += 1
    return counts
