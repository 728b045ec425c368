"""Which chunks of a prompt each of several nodes computes, so that all take equally long. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

# Tokens of context at which attention takes as long for a prompt's token as all the rest of the model does.
DOUBLE_AT = 33_000  # a guess: that of an 8B model on an H200
# Where it takes so many times as long as without context, chunks become no shorter: there are many by then, and those
# that follow on each other take nearly equally long anyway. A guess.
SLOWEST = 4.0
# Longer chunks would make whoever waits for them wait longer, shorter ones don't fill a device; guesses.
MOST_TOKENS, LEAST_TOKENS = 4096, 512
# The first node has one chunk more than the others: with so many rounds that is little. A guess.
ENOUGH_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunk i of a prompt ends at token `ends[i]`, where the next one begins. Nodes take turns: the node at place p
    computes chunks p, p + num_nodes, and so on. Place 0 has the prompt, and so its first chunk and its last."""

    ends: tuple[int, ...]
    num_nodes: int

    def begin(self, index: int) -> int:
        return self.ends[index - 1] if index else 0

    def place_of(self, index: int) -> int:
        return index % self.num_nodes

    def chunk_at(self, position: int) -> int:
        """The chunk of the token at `position`."""
        return bisect.bisect_right(self.ends, position)

    def of(self, place: int) -> range:
        """The chunks that this place computes."""
        return range(place, len(self.ends), self.num_nodes)

    def needed_at(self, place: int) -> list[int]:
        """The chunks that others compute and this place needs: all before its last own one."""
        last = self.of(place)[-1]
        return [index for index in range(last) if self.place_of(index) != place]

    def needed_by(self, index: int) -> list[int]:
        """The places that need chunk `index`, its own left out."""
        own = self.place_of(index)
        return [place for place in range(self.num_nodes) if place != own and self.of(place)[-1] > index]

    def next_of(self, place: int, position: int) -> int:
        """The first chunk of this place that is not computed up to its end, if tokens up to `position` are."""
        at = self.chunk_at(position)
        return at + (place - at) % self.num_nodes

    def makes_sense(self, block_size: int) -> bool:
        """Whether each place has a chunk, place 0 the last, and all but that end with a block. For tables of others."""
        pairs = itertools.pairwise((0, *self.ends))
        is_right = self.num_nodes > 1 and len(self.ends) > self.num_nodes and self.place_of(len(self.ends) - 1) == 0
        return is_right and all(a < b for a, b in pairs) and all(end % block_size == 0 for end in self.ends[:-1])


def divide(first: int, end: int, num_nodes: int, most_tokens: int, block_size: int) -> ChunkTable | None:
    """Divides a prompt's tokens from `first` to `end`, of at least two nodes. Each chunk is whole blocks, but for the
    last, at most `most_tokens` long, which is what a node may compute in one step, and takes as long as the others:
    later ones attend to more, and are shorter. None: it can't be so."""
    begin, whole = _work(first), _work(end) - _work(first)
    # The first is the longest. More rounds than these are needed only where rounding to blocks makes it too long.
    at_least = whole / (_work(first + most_tokens) - begin)
    for num_rounds in itertools.count(max(1, math.ceil((at_least - 1) / num_nodes))):
        num = num_rounds * num_nodes + 1
        equal = [_tokens_of(begin + whole * (index + 1) / num) for index in range(num - 1)]
        ends = [*(round(each / block_size) * block_size for each in equal), end]
        lengths = [after - before for before, after in itertools.pairwise([first, *ends])]
        if min(lengths) <= 0:
            return None
        wants_more = num_rounds < ENOUGH_ROUNDS and min(lengths) >= 2 * LEAST_TOKENS
        if max(lengths) <= most_tokens and not wants_more:
            return ChunkTable(tuple(ends), num_nodes)
    raise AssertionError("chunks become shorter with each round")


def _work(num_tokens: float) -> float:
    """What the first `num_tokens` tokens count together, in tokens without context."""
    growing = min(num_tokens, _GROWS_UNTIL)
    return growing + growing**2 / (2 * DOUBLE_AT) + SLOWEST * (num_tokens - growing)


def _tokens_of(work: float) -> float:
    """The inverse of `_work`."""
    beyond = max(0.0, work - _work(_GROWS_UNTIL))
    return DOUBLE_AT * (math.sqrt(1 + 2 * (work - beyond) / DOUBLE_AT) - 1) + beyond / SLOWEST


_GROWS_UNTIL = (SLOWEST - 1) * DOUBLE_AT  # tokens
