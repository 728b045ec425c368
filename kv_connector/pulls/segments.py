"""Which part of a prompt each of several nodes computes, so that all take equally long. Pure."""

from __future__ import annotations

import itertools
import math

# Tokens of context at which attention takes as long for a prompt's token as all the rest of the model does.
DOUBLE_AT = 33_000  # a guess: that of an 8B model on an H200


def divide(first: int, end: int, num_nodes: int, most_tokens: int, block_size: int) -> list[int]:
    """The ends of the parts of a prompt's tokens from `first` to `end`, `end` itself left out: each part is whole
    blocks but for the last, at most `most_tokens` long, which is what a node computes in one step, and shorter than the
    one before it, since it attends to more. []: they can't be so, or nothing is left to divide."""
    begin, whole = _work(first), _work(end) - _work(first)
    equal = [_tokens_of(begin + whole * (index + 1) / num_nodes) for index in range(num_nodes - 1)]
    ends = [round(each / block_size) * block_size for each in equal]
    most = most_tokens // block_size * block_size
    before = first
    for index, each in enumerate(ends):
        before = ends[index] = min(each, before // block_size * block_size + most)
    after = end
    for index in reversed(range(len(ends))):
        after = ends[index] = max(ends[index], -(-(after - most_tokens) // block_size) * block_size)
    places = [first, *ends, end]
    fits = all(0 < after - before <= most_tokens for before, after in itertools.pairwise(places))
    return ends if fits and num_nodes > 1 else []


def _work(num_tokens: float) -> float:
    """What the first `num_tokens` tokens take together, in tokens without context."""
    return num_tokens + num_tokens**2 / (2 * DOUBLE_AT)


def _tokens_of(work: float) -> float:
    """The inverse of `_work`."""
    return DOUBLE_AT * (math.sqrt(1 + 2 * work / DOUBLE_AT) - 1)
