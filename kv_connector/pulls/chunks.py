"""Which chunks of a prompt each of several nodes computes, and in which turn. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

# Longer chunks would make whoever waits for them wait longer, shorter ones don't fill a device; guesses.
MOST_TOKENS, LEAST_TOKENS = 4096, 512
# The first node has one chunk more than the others: with so many rounds that is little, if chunks are worth a launch.
ENOUGH_ROUNDS = 4  # a guess
WORTHWHILE_TOKENS = 1024  # docs/measurements.md#deadlines-on-a-trace


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
    """Divides a prompt's tokens from `first` to `end`, of at least two nodes, into chunks of equally many tokens: whole
    blocks, but for the last, at most `most_tokens`, which is what a node may compute in one step. Later ones attend to
    more and take longer, but two that are computed at the same time are neighbours; and each turn waits for a node's
    other work, so of long prompts there are as few as can be (docs/simulator.md#chunks). None: it can't be so."""
    todo = end - first
    enough = min(ENOUGH_ROUNDS, (todo // WORTHWHILE_TOKENS - 1) // num_nodes)
    for num_rounds in itertools.count(max(1, enough, math.ceil((todo / most_tokens - 1) / num_nodes))):
        num = num_rounds * num_nodes + 1
        ends = [*(round((first + todo * (index + 1) / num) / block_size) * block_size for index in range(num - 1)), end]
        lengths = [after - before for before, after in itertools.pairwise([first, *ends])]
        if min(lengths) <= 0:
            return None
        if max(lengths) <= most_tokens:  # else rounding made one too long
            return ChunkTable(tuple(ends), num_nodes)
    raise AssertionError("chunks become shorter with each round")
