"""Where the newest tokens of a sequence have stood before, and what followed them there. Pure.

The prompt is sorted once, by numpy; what comes after goes into a dictionary, token by token. So a look-up costs the
same behind ten tokens and behind a hundred thousand.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

CANDIDATES = 8  # places that a look-up compares, the newest first; a guess
_FACTOR = 0x9E3779B97F4A7C15  # any odd number


class TokenIndex:
    """The tokens of one sequence, by the runs of `least` tokens in them. A run is known when a token follows it."""

    def __init__(self, prompt: np.ndarray, least: int, most: int) -> None:
        """`prompt`: int32 tokens. Of several places the one is taken before which the most tokens are the same, up to
        `most`, and of those alike the newest."""
        assert 1 <= least <= most
        self._least, self._most = least, most
        self._tokens: list[int] = prompt.tolist()
        keys = _keys_of(prompt, least)[:-1]  # the last run has no token behind it yet
        order = np.argsort(keys, kind="stable")
        # One number of an array is read faster than one of numpy's, and takes no more memory.
        self._order, self._keys = array("q", order.tobytes()), array("Q", keys[order].tobytes())
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes tokens that follow those that it has."""
        known, ends, least = self._tokens, self._ends, self._least
        for token in tokens:
            if len(known) >= least:
                run, end = tuple(known[-least:]), len(known) - 1
                if run in ends:
                    ends[run].append(end)
                else:
                    ends[run] = [end]
            known.append(token)

    def continuation(self, count: int) -> list[int]:
        """Guesses the next tokens, `count` at most; [] where the newest ones are new. A place so near that its
        continuation runs into the end goes on with what has been guessed, as a loop does. Tokens below 0, which stand
        for images and sounds, are never guessed."""
        end = self._best_end()
        if end is None:
            return []
        tokens, known = self._tokens, len(self._tokens)
        guessed: list[int] = []
        for position in range(end + 1, end + 1 + count):
            token = tokens[position] if position < known else guessed[position - known]
            if token < 0:
                break
            guessed.append(token)
        return guessed

    def _best_end(self) -> int | None:
        best, longest = None, 0
        for end, num_same in self._places():
            length = self._common(end, num_same)
            if length > longest:
                best, longest = end, length
            if length == self._most:
                break
        return best if longest >= self._least else None

    def _places(self) -> Iterator[tuple[int, int]]:
        """Positions of last tokens of runs that may be the newest run, the newest first, and how many tokens up to
        there are the newest ones for sure."""
        if len(self._tokens) < self._least:
            return
        run = self._tokens[-self._least :]
        later = self._ends.get(tuple(run), [])[-CANDIDATES:]
        for end in reversed(later):
            yield end, self._least
        if len(later) < CANDIDATES and len(self._keys):
            key = _key_of(run)
            end = bisect.bisect_right(self._keys, key)
            for index in range(end - 1, max(-1, end - 1 - CANDIDATES + len(later)), -1):
                if self._keys[index] != key:
                    break
                yield self._order[index] + self._least - 1, 0

    def _common(self, end: int, num_same: int) -> int:
        """How many tokens up to `end` are the newest ones, `most` at most and `num_same` at least."""
        tokens, length = self._tokens, num_same
        while length < self._most and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        return length


def _keys_of(tokens: np.ndarray, size: int) -> np.ndarray:
    """uint64: a key for each run of `size` tokens. Equal runs have equal keys, which others may share."""
    if len(tokens) < size:
        return np.empty(0, np.uint64)
    wide = tokens.astype(np.uint64)
    keys = np.zeros(len(tokens) - size + 1, np.uint64)
    for offset in range(size):
        keys = keys * np.uint64(_FACTOR) + wide[offset : offset + len(keys)]
    return keys


def _key_of(run: Sequence[int]) -> int:
    """The same of one run, which for so few tokens takes Python a tenth of the time."""
    key = 0
    for token in run:
        key = key * _FACTOR + token
    return key % (1 << 64)
