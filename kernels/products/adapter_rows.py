"""Adapters in their slots, and which rows of a step take which: what kernels/products/adapters.py multiplies by.

T rows, K inputs, N outputs, R rank (padded to a power of two, 8 or more), P parts: projections merged into one matrix
(q, k, v; gate, up), each with an A of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

LEAST_RANK = 8  # of 16 bits what a thread loads at once
TILE_ROWS = 64  # of a tile of prompts; a guess


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step take which adapter. `order` int32 [T]: the rows, each once, sorted by adapter; `slots` int32
    [T]: the slot of each of these, counted from 1; 0: none. `tiles` int32 [M, 3], contiguous, of steps that have
    prompts: first place in `order`, number of rows (at most TILE_ROWS), slot; of all rows that take an adapter. None:
    decode rows."""

    order: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor | None = None

    def adapted(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Yields (first place, rows int64, slot) of each adapter. Waits for the device."""
        first = 0
        for slot, run in groupby(self.slots.tolist()):
            count = len(list(run))
            if slot:
                yield first, self.order[first : first + count].long(), slot
            first += count


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of one merged projection in their slots: a [slots, P * R, K], b [slots, N, R] (times the adapter's
    scaling), ranks int32 [slots, P], at most R; 0: that part has no adapter. What lies
    beyond a rank is never read of a, and finite in b. `part_sizes`: outputs of each part, N in all."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    part_sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class UnaddedProduct:
    """A product [T, N] to which low B^T is still to be added; `low` as `shrink` makes it."""

    out: torch.Tensor
    low: torch.Tensor
    stack: AdapterStack
    rows: AdapterRows


def padded_rank(rank: int) -> int:
    """R of a stack whose adapters have at most `rank`."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def sorted_rows(adapter_T: np.ndarray) -> np.ndarray:
    """int32 [2, T]: order and slots of rows with adapters in these slots (0: none)."""
    order = np.argsort(adapter_T, kind="stable")
    return np.stack((order, adapter_T[order])).astype(np.int32)


def tiles_of(slot_T: np.ndarray) -> np.ndarray:
    """int32 [M, 3]: the tiles of rows in order."""
    firsts = np.flatnonzero(np.diff(slot_T, prepend=-1))
    tiles = [
        (start, min(TILE_ROWS, last - start), slot)
        for slot, first, last in zip(slot_T[firsts], firsts, [*firsts[1:], len(slot_T)], strict=True)
        for start in range(first, last, TILE_ROWS)
        if slot
    ]
    return np.array(tiles, np.int32).reshape(-1, 3)
