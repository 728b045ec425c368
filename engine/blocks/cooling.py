"""Which blocks launched steps may still write. Part of BlockPool, which says who holds blocks and how far steps are."""

from __future__ import annotations

from collections.abc import Set

from tandem.engine.blocks.publication import NO_STEP


class CoolingBlocks:
    """The newest step that may write each block; those of them that are free cool until it has completed."""

    def __init__(self, num_blocks: int) -> None:
        self._last_write_step = [NO_STEP] * num_blocks
        self._cooling: dict[int, set[int]] = {}  # step -> free blocks that it may still write
        self._newest_launched = NO_STEP
        self._newest_completed = NO_STEP

    def __len__(self) -> int:
        return sum(map(len, self._cooling.values()))

    def is_cooling(self, block_id: int) -> bool:
        """Whether a launched step may still write the block, were it free now."""
        return self._last_write_step[block_id] > self._newest_completed

    def has_completed(self, step_id: int) -> bool:
        return step_id <= self._newest_completed

    def may_write(self, step_id: int, block_id: int) -> None:
        self._last_write_step[block_id] = max(self._last_write_step[block_id], step_id)

    def freed(self, block_id: int) -> None:
        if self.is_cooling(block_id):
            self._cooling.setdefault(self._last_write_step[block_id], set()).add(block_id)

    def taken(self, block_id: int) -> None:
        if self.is_cooling(block_id):
            self._cooling[self._last_write_step[block_id]].discard(block_id)

    def step_launched(self, step_id: int) -> None:
        assert step_id > self._newest_launched, f"step {step_id} launched after {self._newest_launched}"
        self._newest_launched = step_id

    def step_completed(self, step_id: int) -> None:
        assert self._newest_completed < step_id <= self._newest_launched, f"step {step_id} completed out of order"
        self._newest_completed = step_id
        for step in [step for step in self._cooling if step <= step_id]:
            del self._cooling[step]

    def check_integrity(self, free: Set[int]) -> None:
        """Raises AssertionError unless just those of the `free` blocks cool that a launched step may write."""
        cooling = [block_id for blocks in self._cooling.values() for block_id in blocks]
        assert len(cooling) == len(set(cooling)), "a block cools for two steps"
        assert set(cooling) == {b for b in free if self.is_cooling(b)}, "what cools is not free, or nobody writes it"
