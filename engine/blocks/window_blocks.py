"""The blocks in which layers that slide keep their KV, where a model has others as well. Part of BlockPool; ids only.

There `block_size` tokens take several blocks: one for the layers that see everything, which is the one that lists,
tickets and hashes speak of, and, attached to it, its *window blocks*, for as many sliding layers each. Every reference
to a block is one to its window blocks, until its holder says that their tokens have slid out. When nobody needs them
they are free, and stay attached, and so of use to who finds the block, until one of them is reused.
docs/sliding_windows.md#layers-of-both-kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tandem.engine.blocks.free_queue import FreeQueue
from tandem.engine.blocks.window import BlockWindow


class WindowBlocks:
    """Which blocks have which window blocks, and how many holders of each block need them."""

    def __init__(
        self, window: BlockWindow, ref_counts: list[int], hash_of: Sequence[bytes | None], free: FreeQueue
    ) -> None:
        """`ref_counts` and `hash_of` are the pool's, by block; window blocks that somebody needs count 1."""
        self.num_each = window.num_each  # 0: all layers' KV is in the block itself
        self._window, self._ref_counts, self._hash_of, self._free = window, ref_counts, hash_of, free
        self._needed_by = [0] * len(ref_counts)
        self._of: dict[int, tuple[int, ...]] = {}
        self._owner_of: dict[int, int] = {}
        self._turned: dict[bytes, None] | None = None  # see `watch`

    # --- questions ------------------------------------------------------------------------------------------

    def of(self, block_id: int) -> tuple[int, ...]:
        """Its window blocks; (): they were reused, or were never wanted."""
        return self._of.get(block_id, ())

    def pairs(self, source: int, destination: int) -> list[tuple[int, int]]:
        """What is copied where if one block becomes like another."""
        return list(zip((source, *self.of(source)), (destination, *self.of(destination)), strict=True))

    def is_whole(self, block_id: int) -> bool:
        return not self.num_each or block_id in self._of

    def is_better(self, block_id: int, known: int) -> bool:
        """Whether it is whole, and another one is not."""
        return self.is_whole(block_id) and not self.is_whole(known)

    def most(self, num: int) -> int:
        """How many blocks with all their window blocks `num` blocks make at most."""
        return num // (1 + self.num_each)

    def owner(self, block_id: int) -> int | None:
        """The block whose window block this is; None: it is nobody's."""
        return self._owner_of.get(block_id)

    def found_as(self, block_id: int) -> bytes | None:
        """The hash by which this block is found, or the one that it belongs to; None: by none."""
        owner = self.owner(block_id)
        return self._hash_of[block_id if owner is None else owner]

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many window blocks of these blocks nobody needs."""
        if not self.num_each:
            return 0
        return sum(len(self.of(each)) for each in block_ids if not self._needed_by[each])

    def usable(self, block_ids: list[int]) -> list[int]:
        """The most of the first of these blocks that a row behind them can be computed from: those of its window are
        whole."""
        return block_ids[: self.num_usable(len(block_ids), block_ids.__getitem__)]

    def num_usable(self, num: int, block_at: Callable[[int], int | None]) -> int:
        """How many of the first `num` blocks that is. No more of them are looked at than decide it."""
        while self.num_each and num:
            in_window = range(self._window.num_passed(num * self._window.block_size), num)
            lacks = next((i for i in reversed(in_window) if block_at(i) not in self._of), None)
            if lacks is None:
                break
            num = lacks
        return num

    # --- changes --------------------------------------------------------------------------------------------

    def hand_out(self, taken: list[int], num: int, num_bare: int) -> list[int]:
        """The first `num` of these blocks, which have a holder: the others become their window blocks, of which the
        first `num_bare` get none."""
        if not self.num_each:
            return taken
        block_ids, others = taken[:num], iter(taken[num:])
        for block_id in block_ids[num_bare:]:
            own = self._of[block_id] = tuple(islice(others, self.num_each))
            self._owner_of.update(dict.fromkeys(own, block_id))
        for block_id in block_ids:
            self._needed_by[block_id] += 1
        return block_ids

    def need(self, block_id: int) -> None:
        """Notes another holder."""
        self._needed_by[block_id] += 1
        for each in self.of(block_id) if self._needed_by[block_id] == 1 else ():
            self._free.leave(each)
            self._ref_counts[each] = 1

    def pass_by(self, block_ids: Sequence[int], last_step: int | None) -> None:
        """Gives back what a holder has of these blocks' window blocks. `last_step` as for `BlockPool.free`."""
        for block_id in reversed(block_ids):
            assert self._needed_by[block_id] > 0, f"nobody needs the window blocks of block {block_id}"
            self._needed_by[block_id] -= 1
            own, is_needed = self.of(block_id), self._needed_by[block_id] > 0
            for each in own if last_step is not None else ():
                self._free.cooling.may_write(last_step, each)  # type: ignore[arg-type]
            is_found = self._hash_of[block_id] is not None
            if not is_needed and not is_found:
                self._detach(block_id)
            for each in () if is_needed else own:
                self._ref_counts[each] = 0
                self._free.enter(each, is_found)

    def lose(self, block_id: int) -> bool:
        """Notes that a block is not found any more: what nobody needs of it holds nothing. Returns whether it had
        window blocks."""
        had_some = block_id in self._of
        if not self._needed_by[block_id]:
            self._free.void(self._detach(block_id))
        return had_some

    def reuse(self, block_id: int) -> None:
        """Takes a window block, if it is one, and those beside it, from the block that they belong to."""
        owner = self.owner(block_id)
        if owner is not None:
            self._free.void(self._detach(owner))

    def watch(self) -> dict[bytes, None]:
        """Where hashes are noted from now on whose blocks get window blocks or lose them; for one caller, to empty."""
        self._turned = {}
        return self._turned

    def turn(self, block_hash: bytes | None) -> None:
        """Notes that what is found by this hash has become whole or bare."""
        if self._turned is not None and block_hash is not None:
            self._turned[block_hash] = None

    def _detach(self, block_id: int) -> tuple[int, ...]:
        taken = self._of.pop(block_id, ())
        self.turn(self._hash_of[block_id])
        for each in taken:
            del self._owner_of[each]
        return taken

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of this class does not hold."""
        attached = [each for blocks in self._of.values() for each in blocks]
        assert len(attached) == len(set(attached)) == len(self._owner_of), "a window block has two owners"
        assert self._of.keys().isdisjoint(attached), "a window block has window blocks"
        for block_id, blocks in self._of.items():
            counts = {self._ref_counts[each] for each in blocks}
            assert counts == {int(self._needed_by[block_id] > 0)}, f"window blocks of {block_id} are not what it is"
            assert self._ref_counts[block_id] or self._hash_of[block_id] is not None, f"{block_id} keeps what is lost"
        for block_id, count in enumerate(self._needed_by):
            assert count <= self._ref_counts[block_id], f"block {block_id} is needed by who does not hold it"
