"""The blocks that nobody holds, from first to last to be reused. Part of BlockPool; ids only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

from tandem.engine.blocks.cooling import CoolingBlocks


class FreeQueue:
    """The queue, and which of its blocks launched steps may still write (`cooling`)."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._going_first: set[int] = set()  # that were put before others, see `put_first`
        self.cooling = CoolingBlocks(num_blocks + 1)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    @property
    def num_grantable(self) -> int:
        """Blocks that no launched step can write any more."""
        return len(self._blocks) - len(self.cooling)

    def grantable(self, num: int) -> list[int]:
        return list(islice((each for each in self._blocks if not self.cooling.is_cooling(each)), num))

    def enter(self, block_id: int, is_worth_keeping: bool) -> None:
        self._blocks[block_id] = None
        if not is_worth_keeping:
            self.void((block_id,))
        self.cooling.freed(block_id)

    def leave(self, block_id: int) -> None:
        del self._blocks[block_id]
        self._going_first.discard(block_id)
        self.cooling.taken(block_id)

    def void(self, block_ids: Iterable[int]) -> None:
        """Has blocks of the queue that hold nothing worth keeping reused before anything is evicted."""
        for block_id in block_ids:
            self._blocks.move_to_end(block_id, last=False)

    def forget(self, block_id: int) -> bool:
        """Notes that what a block holds is found no more. Returns whether it is in the queue."""
        if block_id in self._blocks:
            self.void((block_id,))
            return True
        return False

    def put_first(self, first: Sequence[int], is_void: Callable[[int], bool]) -> None:
        """Has these reused before all others, but for those that hold nothing or were put first before them."""
        ahead = list(takewhile(lambda each: is_void(each) or each in self._going_first, self._blocks))
        self.void(reversed([*ahead, *first]))
        self._going_first.update(first)

    def goes_first(self, block_id: int | None) -> bool:
        return block_id in self._going_first

    def check_integrity(self, free: set[int]) -> None:
        """Raises AssertionError unless just the blocks that are `free` are here."""
        assert free == set(self._blocks), "the free queue is not the set of blocks without a holder"
        assert self._going_first <= free, "what is used goes first"
        self.cooling.check_integrity(free)
