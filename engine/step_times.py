"""How long a step takes by its number of tokens: what bounds prompt work beside running decodes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping


class StepTimes:
    """A table of measured points, read as straight lines between them. Pure."""

    def __init__(self, seconds_by_tokens: Mapping[int, float]) -> None:
        """At least one point. A larger step that was measured faster than a smaller one counts as equally slow."""
        self._tokens = sorted(seconds_by_tokens)
        self._seconds: list[float] = []
        for tokens in self._tokens:
            self._seconds.append(max([seconds_by_tokens[tokens], *self._seconds[-1:]]))

    def most_tokens(self, seconds: float) -> int:
        """Tokens of the largest step that takes at most `seconds`; 0 if even the smallest measured one takes longer,
        the largest measured one if that takes less."""
        index = bisect.bisect_right(self._seconds, seconds)
        if index == 0:
            return 0
        if index == len(self._tokens):
            return self._tokens[-1]
        low, high = self._seconds[index - 1], self._seconds[index]
        share = (seconds - low) / (high - low)
        return self._tokens[index - 1] + round(share * (self._tokens[index] - self._tokens[index - 1]))
