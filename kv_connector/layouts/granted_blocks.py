"""Which block of a grant is which of the hand-off's: blocks in order, each followed by its window blocks. Pure.

Before the last window nothing reads window blocks, so none is granted: of what slid out nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Entry = tuple[int, int]  # the number of a block in the prompt, and a table: 0 is its own, others its window blocks'


@dataclass(frozen=True, slots=True)
class GrantedBlocks:
    """The blocks of a grant from block `first` of the prompt on, of which those from `first_window` on come with the
    `each` - 1 window blocks of the layout."""

    first: int
    first_window: int
    each: int

    def index(self, entry: Entry) -> int:
        """The place in the grant's list."""
        block, table = entry
        return block - self.first + (self.each - 1) * max(0, block - max(self.first, self.first_window)) + table

    def count(self, num_blocks: int) -> int:
        """How long the list is for a prompt of so many blocks, or for so many leading ones of it."""
        return self.index((num_blocks, 0)) if num_blocks > self.first else 0

    def entries(self, blocks: Iterable[int]) -> Iterator[Entry]:
        """What these blocks of the prompt have in the list, in its order."""
        for block in blocks:
            for table in range(self.each if block >= self.first_window else 1):
                yield block, table
