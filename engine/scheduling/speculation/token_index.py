"""Where the newest tokens of a sequence have stood before, and what followed them there. Pure.

The prompt is sorted once, by numpy; what comes after goes into a dictionary, token by token. So a look-up costs the
same behind ten tokens and behind a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

CANDIDATES = 8  # places that a look-up compares, the newest first; a guess
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # any odd number


class TokenIndex:
    """The tokens of one sequence, by the runs of `least` tokens in them. A run is known when a token follows it."""

    def __init__(self, prompt: np.ndarray, least: int, most: int) -> None:
        """`prompt`: int32 tokens. Of several places the one is taken before which the most tokens are the same, up to
        `most`, and of those alike the newest."""
        assert 1 <= least <= most
        self._least, self._most = least, most
        self._tokens: list[int] = prompt.tolist()
        keys = _keys_of(prompt, least)[:-1]  # the last run has no token behind it yet
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes tokens that follow those that it has."""
        for token in tokens:
            end = len(self._tokens) - 1
            if end + 1 >= self._least:
                run = tuple(self._tokens[end + 1 - self._least :])
                self._ends.setdefault(run, []).append(end)
            self._tokens.append(token)

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
        for end in self._places():
            length = self._common(end)
            if length > longest:
                best, longest = end, length
            if length == self._most:
                break
        return best if longest >= self._least else None

    def _places(self) -> Iterator[int]:
        """Positions of last tokens of runs that may be the newest run, the newest first."""
        if len(self._tokens) < self._least:
            return
        run = self._tokens[-self._least :]
        later = self._ends.get(tuple(run), [])[-CANDIDATES:]
        yield from reversed(later)
        if len(later) < CANDIDATES and len(self._keys):
            key = _keys_of(np.array(run, np.int32), self._least)[0]
            first, last = (int(np.searchsorted(self._keys, key, side)) for side in ("left", "right"))
            earlier = self._order[max(first, last - CANDIDATES + len(later)) : last]
            yield from (int(place) + self._least - 1 for place in earlier[::-1])

    def _common(self, end: int) -> int:
        """How many tokens up to `end` are the newest ones, `most` at most."""
        tokens, length = self._tokens, 0
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
        keys = keys * _FACTOR + wide[offset : offset + len(keys)]
    return keys
