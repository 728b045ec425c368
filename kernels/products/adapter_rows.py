"""Adapters in their slots, and which rows of a step take which: what kernels/products/adapters.py multiplies by.

T rows, K inputs, N outputs, R rank (padded to a power of two, 16 or more), P parts: projections merged into one matrix
(q, k, v; gate, up), each with an A of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

LEAST_RANK = 16  # tl.dot's smallest inner dimension
FEW_TILE_ROWS, MANY_TILE_ROWS = 16, 64  # rows of a tile: of decode steps, of prompts; 64 is a guess
ALIGNED = 4  # int32 words; kernels are compiled for pointers to multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step take which adapter. `order` int32 [T]: the rows, sorted by adapter. `tiles` int32 [M, 3],
    contiguous: first place in `order`, number of rows (at most `tile_rows`), slot counted from 1; slot 0: these rows
    take none. `num_tiles` int32 [1]: those after so many are of slot 0 and no rows. Every row is in one tile."""

    order: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    tile_rows: int

    @classmethod
    def view(cls, words: torch.Tensor, num_rows: int, tile_rows: int) -> AdapterRows:
        """What `tile_words` laid out."""
        tiles = words[num_words(num_rows, 0) :].view(-1, 3)
        return cls(words[ALIGNED : ALIGNED + num_rows], tiles, words[:1], tile_rows)

    def adapted(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yields (first place, rows int64, slot) of each tile with an adapter. Waits for the device."""
        for first, count, slot in self.tiles.tolist():
            if slot:
                yield first, self.order[first : first + count].long(), slot


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of one merged projection in their slots: a [slots, P * R, K], b [slots, N, R] (times the adapter's
    scaling), ranks int32 [slots, P], at most R; 0: that part has no adapter. What lies beyond a rank is never read.
    `part_sizes`: outputs of each part, N in all."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    part_sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


def padded_rank(rank: int) -> int:
    """R of a stack whose adapters have at most `rank`."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def most_tiles(num_rows: int, num_slots: int, tile_rows: int) -> int:
    """Tiles that so many rows, with adapters of so many slots or none, make at most."""
    return min(num_rows, num_slots + 1 + num_rows // tile_rows)


def num_words(num_rows: int, num_tiles: int) -> int:
    """int32 words that `tile_words` lays out."""
    return ALIGNED + -(-num_rows // ALIGNED) * ALIGNED + 3 * num_tiles


def tile_words(adapter_T: np.ndarray, tile_rows: int, at_least: int = 0) -> np.ndarray:
    """int32: what `AdapterRows.view` reads, for rows with adapters in these slots (0: none), with so many tiles or
    more."""
    order = np.argsort(adapter_T, kind="stable")
    firsts = np.flatnonzero(np.diff(adapter_T[order], prepend=-1))
    tiles = [
        (start, min(tile_rows, last - start), slot)
        for slot, first, last in zip(adapter_T[order[firsts]], firsts, [*firsts[1:], len(order)], strict=True)
        for start in range(first, last, tile_rows)
    ]
    words = np.zeros(num_words(len(order), max(at_least, len(tiles))), np.int32)
    words[0], words[ALIGNED : ALIGNED + len(order)] = len(tiles), order
    start = num_words(len(order), 0)
    words[start : start + 3 * len(tiles)] = np.array(tiles).ravel()
    return words
