"""A table of which owner holds which block, in a few bytes for each entry. Pure.

One dict from 60 bits of a block's hash (an int of 32 bytes) to a mask with one bit for each (owner, tier) that holds
it. Equal masks are one object, so a million blocks cost their keys and their places in the dict: 70 to 95 bytes each,
however many owners hold them. An owner is a column of bits; dropping one takes it out of the columns that count, and
its bits are swept up later, a few blocks at a time.

Two hashes with the same 60 bits are taken for one: with a million entries that happens to one lookup in 10^10, and
then a placement is worse than it could be. Nodes compare whole hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tandem.kv_connector.directory.records import HASH_BYTES

KEY_MASK = np.uint64((1 << 60) - 1)
BITS_PER_OWNER = 4  # three tiers, and one to spare that keeps columns apart
MAX_SHARED_MASKS = 65_536  # a guess


def key_of(block_hash: bytes) -> int:
    """The key of a block: 60 bits of its 16-byte hash."""
    return int.from_bytes(block_hash[:8], "little") & (1 << 60) - 1


def keys_of(block_hashes: Sequence[bytes]) -> list[int]:
    """The key of each block, as `key_of` makes it."""
    return keys_of_joined(b"".join(block_hashes))


def keys_of_joined(hashes: bytes) -> list[int]:
    """The keys of concatenated hashes, as `keys_of` makes them. Raises ValueError when the length is no multiple of 16
    bytes."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of {HASH_BYTES}-byte block hashes")
    keys: list[int] = (np.frombuffer(hashes, "<u8")[::2] & KEY_MASK).tolist()
    return keys


class Holders:
    """The table of holders. Columns are small ints from `open_column`; tiers are 0, 1 and 2."""

    def __init__(self) -> None:
        self._mask_of: dict[int, int] = {}
        self._shared: dict[int, int] = {}  # mask -> the object that stands for it
        self._live = 0  # mask of all bits of open columns
        self._free: list[int] = []
        self._closed: list[int] = []  # closed columns whose bits may still be in masks
        self._num_columns = 0
        self._num_sweeping = 0  # how many of `_closed` this sweep takes out
        self._to_sweep: list[int] = []

    def __contains__(self, key: int) -> bool:
        """Whether somebody holds the block, or did until not long ago."""
        return key in self._mask_of

    def __len__(self) -> int:
        """The number of blocks, including those of dropped owners that were not swept up yet."""
        return len(self._mask_of)

    def open_column(self) -> int:
        if self._free:
            column = self._free.pop()
        else:
            column, self._num_columns = self._num_columns, self._num_columns + 1
        self._live |= _column_bits(column)
        return column

    def close_column(self, column: int) -> None:
        """Empties a column at once. It is used again once its bits have been swept up."""
        self._live &= ~_column_bits(column)
        self._closed.append(column)

    def add(self, column: int, tier: int, keys: Iterable[int], room: int) -> int:
        """Adds blocks to a column's tier, and returns how many of them are new to the column. At most `room` new ones
        are taken; the others are left out."""
        mask_of, shared = self._mask_of, self._shared
        bit, own = 1 << (BITS_PER_OWNER * column + tier), _column_bits(column)
        num_new = 0
        for key in keys:
            mask = mask_of.get(key, 0)
            if not mask & own:
                if num_new == room:
                    continue
                num_new += 1
            mask |= bit
            mask_of[key] = shared.setdefault(mask, mask)
        if len(shared) > MAX_SHARED_MASKS:
            shared.clear()
        return num_new

    def remove(self, column: int, tier: int, keys: Iterable[int]) -> int:
        """Removes blocks from a column's tier. Returns how many of them the column holds in no tier any more."""
        mask_of, shared = self._mask_of, self._shared
        bit, own = 1 << (BITS_PER_OWNER * column + tier), _column_bits(column)
        num_gone = 0
        for key in keys:
            mask = mask_of.get(key, 0)
            if not mask & bit:
                continue
            mask ^= bit
            num_gone += not mask & own
            if mask:
                mask_of[key] = shared.setdefault(mask, mask)
            else:
                del mask_of[key]
        return num_gone

    def prefixes(self, keys: Iterable[int]) -> dict[int, int]:
        """For each column, how many of the first of these blocks it holds in any tier; columns with none are left out.
        `keys` is read only as long as some column holds all that came before.
        """
        live, num_keys = self._live, 0
        found: dict[int, int] = {}
        previous: int | None = -1
        holding = -1
        for num_keys, mask in enumerate(map(self._mask_of.get, keys), 1):
            if mask is previous:
                continue
            previous = mask
            still = holding & _any_tier((mask or 0) & live)
            if num_keys > 1:
                for column in _columns(holding ^ still):
                    found[column] = num_keys - 1
            holding = still
            if not holding:
                return found
        if num_keys:
            for column in _columns(holding):
                found[column] = num_keys
        return found

    def sweep(self, num_blocks: int) -> None:
        """Takes closed columns out of the next `num_blocks` blocks. After a full round the columns may be used
        again."""
        if not self._closed:
            return
        if not self._to_sweep:
            self._to_sweep, self._num_sweeping = list(self._mask_of), len(self._closed)
        part = self._to_sweep[-num_blocks:]
        del self._to_sweep[-num_blocks:]
        mask_of, shared, live = self._mask_of, self._shared, self._live
        for key in part:
            mask = mask_of.get(key, 0)
            kept = mask & live
            if kept == mask:
                continue
            if kept:
                mask_of[key] = shared.setdefault(kept, kept)
            else:
                del mask_of[key]
        if not self._to_sweep:
            self._free += self._closed[: self._num_sweeping]
            del self._closed[: self._num_sweeping]
            self._shared.clear()

    def count(self, column: int) -> int:
        """The number of blocks that the column holds. Looks at every block."""
        own = _column_bits(column)
        return sum(1 for mask in self._mask_of.values() if mask & own)

    def check_integrity(self) -> None:
        columns = {*self._free, *self._closed}
        assert len(columns) == len(self._free) + len(self._closed), "a column is free or closed, once"
        for column in range(self._num_columns):
            assert bool(self._live & _column_bits(column)) == (column not in columns)
        for column in self._free:
            assert not self.count(column), "a free column has no bits left"
        assert all(self._mask_of.values()), "a block without a holder"


def _column_bits(column: int) -> int:
    return 0b111 << BITS_PER_OWNER * column


def _any_tier(mask: int) -> int:
    """Reduces a mask to one bit for each column that holds the block in any tier."""
    low = mask | mask >> 1 | mask >> 2
    return low & _lowest_bits(mask.bit_length())


_LOWEST: dict[int, int] = {}


def _lowest_bits(num_bits: int) -> int:
    """A mask of the first bit of each column, up to `num_bits` and one column beyond."""
    num_columns = num_bits // BITS_PER_OWNER + 1
    if num_columns not in _LOWEST:
        _LOWEST[num_columns] = sum(1 << BITS_PER_OWNER * column for column in range(num_columns))
    return _LOWEST[num_columns]


def _columns(lowest_bits: int) -> Iterable[int]:
    while lowest_bits:
        lowest = lowest_bits & -lowest_bits
        yield (lowest.bit_length() - 1) // BITS_PER_OWNER
        lowest_bits ^= lowest
