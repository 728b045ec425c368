"""How long steps take by their number of tokens. Pure. When the running step ends is `StepClock`'s to say."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

SMOOTHING = 1 / 16  # a guess
MOST_SLOWNESS = 3.0  # a guess
MOST_CHANGE = 0.25  # most that one step counts: beyond it something else than the step took the time; a guess


class StepTimes:
    """A table of measured points, and what serving adds to them: attention over real lengths, patches of the batch.
    Steps that graphs run take as long as the next graph's, others are on straight lines between the points. Pure."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self.largest_graph = 0  # up to so many tokens a step is run as one of the next larger size; 0: none
        self._seconds: list[float] = []
        self._slowness = 1.0
        self._read: dict[int, float] = {}  # tokens -> seconds, as the table says

    @property
    def are_measured(self) -> bool:
        """Whether steps have been measured; nothing but `measured` may be called before."""
        return bool(self._tokens)

    def measured(self, seconds_by_tokens: Mapping[int, float], largest_graph: int = 0) -> None:
        """Takes the table, once, with at least one point. A larger step that was measured faster than a smaller one
        counts as equally slow. `largest_graph`: tokens of the largest step that a graph runs; the table has the size of
        each graph, since products of a few more rows may be done in another way that takes much longer."""
        self._tokens, self.largest_graph = sorted(seconds_by_tokens), largest_graph
        for tokens in self._tokens:
            self._seconds.append(max([seconds_by_tokens[tokens], *self._seconds[-1:]]))

    def observed(self, tokens: int, seconds: float) -> None:
        """Learns from how long a step with prompt work took in fact."""
        ratio = min(MOST_SLOWNESS, max(1.0, seconds / self._seconds_of(tokens)))
        self._slowness += SMOOTHING * min(MOST_CHANGE, ratio - self._slowness)

    def _seconds_of(self, tokens: int) -> float:
        index = bisect.bisect_right(self._tokens, tokens)
        if index in (0, len(self._tokens)):
            return self._seconds[min(index, len(self._tokens) - 1)]
        if tokens <= self.largest_graph:
            return self._seconds[bisect.bisect_left(self._tokens, tokens)]
        low, high = self._tokens[index - 1], self._tokens[index]
        share = (tokens - low) / (high - low)
        return self._seconds[index - 1] + share * (self._seconds[index] - self._seconds[index - 1])

    def seconds(self, tokens: int) -> float:
        """The expected seconds of a step of so many tokens, in proportion beyond the largest that was measured."""
        seconds = self._read.get(tokens)
        if seconds is None:  # every step with drafts asks for as many sizes as it may have drafts
            seconds = self._read[tokens] = self._seconds_of(tokens) * max(1.0, tokens / self._tokens[-1])
        return seconds * self._slowness

    def num_free_beside(self, tokens: int) -> int:
        """How many more tokens a step of so many can have without getting larger: it is run as one of the next size
        that was measured. 0 beyond the largest."""
        index = bisect.bisect_left(self._tokens, tokens)
        return self._tokens[index] - tokens if index < len(self._tokens) else 0

    def most_tokens(self, seconds: float) -> int:
        """Tokens of the largest step that takes at most `seconds`, in proportion beyond the largest that was measured;
        0 if even the smallest measured one takes longer."""
        seconds /= self._slowness
        index = bisect.bisect_right(self._seconds, seconds)
        if index == 0:
            return 0
        if index == len(self._tokens):
            return int(self._tokens[-1] * seconds / self._seconds[-1])
        if self._tokens[index - 1] < self.largest_graph:
            return self._tokens[index - 1]
        low, high = self._seconds[index - 1], self._seconds[index]
        share = (seconds - low) / (high - low)
        return self._tokens[index - 1] + round(share * (self._tokens[index] - self._tokens[index - 1]))
