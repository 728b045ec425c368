"""Which leading blocks of a sequence are not read any more by layers that slide. Pure; docs/sliding_windows.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockWindow:
    """The widest window of a model's layers, in tokens: a query sees itself and so many less one before it."""

    num_tokens: int
    block_size: int
    num_each: int = 0  # of window blocks that a block has, where other layers see everything (window_blocks.py)

    def num_passed(self, position: int) -> int:
        """How many leading blocks lie wholly before all that queries at `position` and behind it see."""
        return max(0, position - self.num_tokens + 1) // self.block_size

    def most_held(self, row_tokens: int) -> int:
        """The most blocks that a sequence has whose rows are of up to so many tokens: those that its newest launched
        row sees, its own, and those of the next."""
        return (self.num_tokens - 1 + 2 * row_tokens) // self.block_size + 2

    @property
    def num_before(self) -> int:
        """How many blocks before a block's end are read by a row that begins there, at most."""
        return -(-(self.num_tokens - 1) // self.block_size)

    @property
    def num_null_blocks(self) -> int:
        """How many blocks of the node's memory the pool lacks, since passed places of block tables point there."""
        return int(self != NO_WINDOW)


NO_WINDOW = BlockWindow(1 << 62, 1)  # some layer sees everything: nothing is ever passed
