"""Where the newest tokens of a sequence have stood before, and what followed them there. Pure.

The prompt is sorted once, by numpy; what comes after goes into a dictionary, token by token. So a look-up costs the
same behind ten tokens and behind a hundred thousand.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Sequence

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
        guessed = tokens[end + 1 : end + 1 + count]
        if len(guessed) == count and min(guessed, default=0) >= 0:
            return guessed
        guessed = []
        for position in range(end + 1, end + 1 + count):
            token = tokens[position] if position < known else guessed[position - known]
            if token < 0:
                break
            guessed.append(token)
        return guessed

    def _best_end(self) -> int | None:
        """The last token of the place before which the most tokens are the newest ones; None: they are new."""
        if len(self._tokens) < self._least:
            return None
        run = self._tokens[-self._least :]
        later = self._ends.get(tuple(run), ())[: -1 - CANDIDATES : -1]
        best, longest = self._best_of(later, None, self._least - 1)
        if longest < self._most and len(later) < CANDIDATES:
            best, _ = self._best_of(self._in_prompt(run, CANDIDATES - len(later)), best, longest)
        return best

    def _best_of(self, places: Iterable[int], best: int | None, longest: int) -> tuple[int | None, int]:
        """The best of these places and `best`, where `longest` tokens are the newest ones, and how many are there."""
        tokens, most = self._tokens, self._most
        for end in places:
            # A better place has one more token alike at least: most others are known by that one.
            if longest <= end and tokens[end - longest] == tokens[-1 - longest]:
                length = 0
                while length < most and length <= end and tokens[end - length] == tokens[-1 - length]:
                    length += 1
                if length > longest:
                    best, longest = end, length
                    if length == most:
                        break
        return best, longest

    def _in_prompt(self, run: Sequence[int], count: int) -> Sequence[int]:
        """Positions of last tokens of runs of the prompt that may be this run, the newest first, `count` at most."""
        key = _key_of(run)
        end = bisect.bisect_right(self._keys, key)
        first = end
        while first and end - first < count and self._keys[first - 1] == key:
            first -= 1
        return [place + self._least - 1 for place in self._order[first:end][::-1]]


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
