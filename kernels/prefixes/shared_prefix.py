"""Shared prefixes of a decode batch on the device, in buffers that keep their addresses.

A captured graph reads them anew at each replay, so groups may change, or vanish, without another capture. Zero groups
are valid. Shapes: N rows of the batch, C chunks of up to M rows (prefix_groups.py makes the numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.kernels.prefixes.prefix_groups import PrefixGroup, PrefixLayout, max_chunks


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Which rows of a step share leading tokens. The rows of chunk c, `chunk_rows[c]` (-1: none) begin with the same
    `chunk_lens[c]` tokens, read through the first one's block table. Chunks with tokens come first. Row i's part is
    member `row_places[i] % M` of chunk `row_places[i] // M`; `row_lens[i]` is 0 when it shares nothing."""

    chunk_lens: torch.Tensor  # int32 [C], multiples of prefix_groups.LARGEST_TILE and of the block size
    chunk_rows: torch.Tensor  # int32 [C, M]
    row_lens: torch.Tensor  # int32 [N], below the row's length
    row_places: torch.Tensor  # int32 [N]
    saved_bytes: int = 0  # of a layer's keys and values, which are not read again

    @property
    def members(self) -> int:
        return self.chunk_rows.shape[1]

    def first(self, num_rows: int) -> SharedPrefixes:
        """Views for the batch's first `num_rows` rows, none behind which shares anything."""
        chunks = min(len(self.chunk_lens), max_chunks(num_rows))
        return SharedPrefixes(
            self.chunk_lens[:chunks], self.chunk_rows[:chunks], self.row_lens[:num_rows], self.row_places[:num_rows]
        )


class PrefixBuffers:
    """Owns the device memory of SharedPrefixes of up to `rows` rows."""

    def __init__(self, rows: int, members: int, device: torch.device) -> None:
        self._layout = PrefixLayout.for_rows(rows, members)
        self._words = torch.zeros(self._layout.num_words, dtype=torch.int32, device=device)
        self.prefixes = SharedPrefixes(*self._layout.split(self._words))  # type: ignore[arg-type]
        self.load((), 1)

    def load(self, groups: Sequence[PrefixGroup], block_size: int) -> None:
        """Makes these the prefixes from here on (in stream order); the copy doesn't wait."""
        words = torch.from_numpy(self._layout.pack(groups, block_size))
        if self._words.is_cuda:
            words = words.pin_memory()
        self._words.copy_(words, non_blocking=True)
