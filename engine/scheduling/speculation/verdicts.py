"""Which rows of a step were computed behind tokens that are its sequences' own. Pure.

A row with a draft is one of its sequence's rows, directly behind the row that the draft is a guess for. What the model
draws there is its own token for that place, by the place's own random number. If the draft is that token, the row
behind it was computed behind the right tokens, and what it draws is the next token, exactly as a later step would have
drawn it. If not, everything behind it is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """The samples `first` … `end` - 1 of a step, which are one sequence's: behind its newest token, then behind each of
    its drafts. Those before `kept` stand behind its own tokens; the others are void."""

    first: int
    kept: int
    end: int


def runs_of(drafts: Sequence[int], token_ids: Sequence[int]) -> list[Run]:
    """The runs of samples, in order. `drafts[i]`: the draft that sample i stands behind, below 0 for none;
    `token_ids[i]`: what it drew."""
    runs: list[Run] = []
    first = kept = 0
    for index, draft in enumerate(drafts):
        if draft < 0:
            if index:
                runs.append(Run(first, kept, index))
            first, kept = index, index + 1
        elif kept == index and token_ids[index - 1] == draft:
            kept = index + 1
    if drafts:
        runs.append(Run(first, kept, len(drafts)))
    return runs
