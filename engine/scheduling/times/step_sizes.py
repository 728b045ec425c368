"""The sizes at which steps with prompts compute the most tokens a second. Pure.

Products and attention are cut into tiles, which go over a device's multiprocessors in waves. What is left over for the
last wave takes as long as a full one, so that a step of 1,088 tokens may take a third longer than one of 1,024
(docs/measurements.md#sizes-of-steps). What a step may have is cut to a size that is done in whole waves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from itertools import accumulate

TOLERANCE = 0.03  # a larger size that is slower by so much is as good: the host has less to do; a guess


class StepSizes:
    """Sizes in tokens, streams' among them, and how fast each is. None are known until `measured`."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._rates: list[float] = []

    def measured(self, seconds_by_tokens: Mapping[int, float]) -> None:
        """Takes, once, how long steps of a size take, over a context that is usual for long prompts."""
        self._sizes = sorted(seconds_by_tokens)
        self._rates = [tokens / seconds_by_tokens[tokens] for tokens in self._sizes]

    def at_most(self, num_tokens: int) -> int:
        """The size to which a step of `num_tokens` should be cut; `num_tokens` where it is smaller than what was
        measured, or so large that the last wave is little of it."""
        if not self._sizes or not self._sizes[0] <= num_tokens < 2 * self._sizes[-1]:
            return num_tokens
        end = bisect.bisect_right(self._sizes, num_tokens)
        least = (1 - TOLERANCE) * max(self._rates[:end])
        return max(size for size, rate in zip(self._sizes[:end], self._rates[:end], strict=True) if rate >= least)

    def cut(self, budget: int, num_beside: int, left: Iterable[int]) -> int:
        """The prompt tokens of a step that has room for `budget` beside so many others: fewer where a smaller step is
        faster by the token and prompts, which have `left` to compute, have more than fit."""
        cut_to = self.at_most(num_beside + budget) - num_beside
        is_cut = cut_to < budget and any(num > budget for num in accumulate(left))
        return cut_to if is_cut else budget
