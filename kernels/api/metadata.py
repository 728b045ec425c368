"""What attention needs to know about the batch of one step.

Shapes: N rows (sequences), T new tokens over all rows, B blocks a table can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tandem.kernels.prefixes.shared_prefix import SharedPrefixes

IntsOnHost = Sequence[int] | np.ndarray
IntMatrix = torch.Tensor | np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows that one kernel launch serves: either decode rows (one new token each) or prefill rows.

    Device tensors for kernels, host tuples for backends that loop. `scratch` keeps what layers of one step share
    (gather indices, masks); it lives as long as the metadata.
    """

    query_start_loc: torch.Tensor  # int32 [N+1], relative to these rows' first token
    seq_lens: torch.Tensor  # int32 [N]
    block_tables: torch.Tensor  # int32 [N, B]
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    max_query_len: int
    max_seq_len: int
    shared_prefixes: SharedPrefixes | None = None  # of decode rows; backends may ignore them
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_cpu)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's batch. Rows 0 … num_decode_rows-1 have exactly one new token each; the runner sorts them first.

    `seq_lens` count the new tokens. A `slot_mapping` entry of -1 means: compute, but don't write that token's KV.
    Cross attention: row i's encoder has `encoder_seq_lens[i]` tokens in the blocks of `cross_block_tables[i]`;
    `cross_slot_mapping` says where the encoder's KV is written on the one step that brings it.
    """

    query_start_loc: torch.Tensor  # int32 [N+1]
    seq_lens: torch.Tensor  # int32 [N]
    block_tables: torch.Tensor  # int32 [N, B]
    slot_mapping: torch.Tensor  # int64 [T]
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    encoder_seq_lens: torch.Tensor | None = None  # int32 [N]
    encoder_seq_lens_cpu: tuple[int, ...] = ()
    cross_block_tables: torch.Tensor | None = None  # int32 [N, B']
    cross_slot_mapping: torch.Tensor | None = None  # int64 [encoder tokens of this step]
    shared_prefixes: SharedPrefixes | None = None  # of the decode rows
    rows_follow: bool = False  # some decode rows are one sequence's: one reads what the other stores
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def is_prompt(self) -> bool:
        """Whether any row brings more than one new token."""
        return self.num_decode_rows < self.num_rows

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    def decode_rows(self) -> RowBatch:
        """The leading rows with one new token each (cached, so that layers share its scratch)."""
        return self._rows("decode", 0, self.num_decode_rows)

    def prefill_rows(self) -> RowBatch:
        """All other rows (cached)."""
        return self._rows("prefill", self.num_decode_rows, self.num_rows)

    def all_rows(self) -> RowBatch:
        """Every row as a prefill row (cached): for passes without a cache."""
        return self._rows("all", 0, self.num_rows)

    def encoder_rows(self, by_encoder_lens: bool) -> RowBatch:
        """Every row with its new tokens alone. `by_encoder_lens`: their numbers are those of `encoder_seq_lens`, where
        those are set."""
        lengths = self.encoder_seq_lens_cpu if by_encoder_lens and self.encoder_seq_lens_cpu else self.query_lens_cpu
        if ("encoder", lengths) not in self.scratch:
            device = self.query_start_loc.device
            starts = np.concatenate(([0], np.cumsum(lengths)))
            self.scratch["encoder", lengths] = RowBatch(
                query_start_loc=_to_device(starts, torch.int32, device),
                seq_lens=_to_device(lengths, torch.int32, device),
                block_tables=self.block_tables,
                query_lens_cpu=lengths,
                seq_lens_cpu=lengths,
                max_query_len=max(lengths, default=0),
                max_seq_len=max(lengths, default=0),
            )
        rows: RowBatch = self.scratch["encoder", lengths]
        return rows

    def cross_rows(self) -> RowBatch:
        """All rows, with the encoder's lengths and blocks in place of the decoder's (cached)."""
        assert self.encoder_seq_lens is not None
        if "cross" not in self.scratch:
            self.scratch["cross"] = RowBatch(
                query_start_loc=self.query_start_loc,
                seq_lens=self.encoder_seq_lens,
                block_tables=self.block_tables if self.cross_block_tables is None else self.cross_block_tables,
                query_lens_cpu=self.query_lens_cpu,
                seq_lens_cpu=self.encoder_seq_lens_cpu,
                max_query_len=self.max_query_len,
                max_seq_len=max(self.encoder_seq_lens_cpu, default=0),
            )
        rows: RowBatch = self.scratch["cross"]
        return rows

    def _rows(self, name: str, first: int, last: int) -> RowBatch:
        if name not in self.scratch:
            start = self.query_start_loc[first : last + 1]
            self.scratch[name] = RowBatch(
                query_start_loc=start - first if first else start,  # every row before `first` has one token
                seq_lens=self.seq_lens[first:last],
                block_tables=self.block_tables[first:last],
                query_lens_cpu=self.query_lens_cpu[first:last],
                seq_lens_cpu=self.seq_lens_cpu[first:last],
                max_query_len=max(self.query_lens_cpu[first:last], default=0),
                max_seq_len=max(self.seq_lens_cpu[first:last], default=0),
                shared_prefixes=self.shared_prefixes if name == "decode" else None,
            )
        rows: RowBatch = self.scratch[name]
        return rows


@dataclass(frozen=True, eq=False)
class PagedAttentionMetadata:
    """Whole prompts in the short form: all `seq_lens_tensor[i]` tokens of row i are new, and go into the blocks of
    `block_tables[i]`. `Attention.forward` takes it, and completes it for the cache that it is given."""

    seq_lens_tensor: torch.Tensor  # ints [N]
    block_tables: torch.Tensor  # ints [N, B]

    def in_blocks_of(self, block_size: int) -> AttentionMetadata:
        """The batch for a cache of such blocks. Raises ValueError when a row has more tokens than its blocks hold."""
        lengths = self.seq_lens_tensor.tolist()
        tables = self.block_tables.cpu().numpy()
        if len(lengths) != len(tables) or max(lengths, default=0) > tables.shape[1] * block_size:
            shape = tuple(tables.shape)
            raise ValueError(f"block_tables {shape} of {block_size}-token blocks don't hold rows of {lengths} tokens")
        slots = [slots_of(table, 0, length, block_size) for table, length in zip(tables, lengths, strict=True)]
        return AttentionMetadataBuilder().build(
            lengths, lengths, self.block_tables, np.concatenate(slots), self.block_tables.device
        )


class AttentionMetadataBuilder:
    """Makes `AttentionMetadata` from host lengths and block tables (host or already on the device)."""

    def build(
        self,
        query_lens: IntsOnHost,
        seq_lens: IntsOnHost,
        block_tables: IntMatrix,
        slot_mapping: IntsOnHost | torch.Tensor,
        device: torch.device | str = "cpu",
        *,
        encoder_seq_lens: IntsOnHost | None = None,
        cross_block_tables: IntMatrix | None = None,
        cross_slot_mapping: IntsOnHost | torch.Tensor | None = None,
        shared_prefixes: SharedPrefixes | None = None,
        rows_follow: bool = False,
    ) -> AttentionMetadata:
        """`query_lens[i]` new tokens of row i, whose length becomes `seq_lens[i]`; rows with one token come first.
        `rows_follow`: some of those are one sequence's.

        Raises ValueError when the lengths contradict each other. Host data is copied without waiting.
        """
        device = torch.device(device)
        queries = tuple(int(n) for n in query_lens)
        totals = tuple(int(n) for n in seq_lens)
        _check_lengths(queries, totals, slot_mapping)
        encoder = None if encoder_seq_lens is None else tuple(int(n) for n in encoder_seq_lens)
        starts = np.zeros(len(queries) + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        return AttentionMetadata(
            query_start_loc=_to_device(starts, torch.int32, device),
            seq_lens=_to_device(totals, torch.int32, device),
            block_tables=_table_to_device(block_tables, len(queries), device),
            slot_mapping=_to_device(slot_mapping, torch.int64, device).reshape(-1),
            num_decode_rows=_count_decode_rows(queries),
            max_query_len=max(queries, default=0),
            max_seq_len=max(totals, default=0),
            query_lens_cpu=queries,
            seq_lens_cpu=totals,
            encoder_seq_lens=None if encoder is None else _to_device(encoder, torch.int32, device),
            encoder_seq_lens_cpu=encoder or (),
            cross_block_tables=None
            if cross_block_tables is None
            else _table_to_device(cross_block_tables, len(queries), device),
            cross_slot_mapping=None
            if cross_slot_mapping is None
            else _to_device(cross_slot_mapping, torch.int64, device).reshape(-1),
            shared_prefixes=shared_prefixes,
            rows_follow=rows_follow,
        )


def slots_of(
    block_table: Sequence[int] | np.ndarray, first_position: int, num_tokens: int, block_size: int
) -> np.ndarray:
    """int64 [num_tokens]: the slots of positions `first_position` … in a sequence with this block table."""
    positions = np.arange(first_position, first_position + num_tokens, dtype=np.int64)
    table = np.asarray(block_table, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _count_decode_rows(query_lens: tuple[int, ...]) -> int:
    for index, length in enumerate(query_lens):
        if length != 1:
            return index
    return len(query_lens)


def _check_lengths(queries: tuple[int, ...], totals: tuple[int, ...], slot_mapping: Any) -> None:
    if len(queries) != len(totals):
        raise ValueError(f"query_lens has {len(queries)} rows, seq_lens has {len(totals)}")
    for row, (new, total) in enumerate(zip(queries, totals, strict=True)):
        if new < 0 or total < new:
            raise ValueError(f"row {row}: {new} new tokens don't fit a sequence of {total}")
    num_slots = slot_mapping.numel() if isinstance(slot_mapping, torch.Tensor) else np.size(slot_mapping)
    if num_slots != sum(queries):
        raise ValueError(f"slot_mapping has {num_slots} entries for {sum(queries)} new tokens")


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values, dtype=np.int64))
    return tensor.to(device=device, dtype=dtype, non_blocking=True)


def _table_to_device(table: IntMatrix, num_rows: int, device: torch.device) -> torch.Tensor:
    """Pads ragged host tables with 0; kernels never read past a row's sequence length."""
    if not isinstance(table, (torch.Tensor, np.ndarray)):
        width = max((len(row) for row in table), default=0)
        padded = np.zeros((len(table), width), np.int32)
        for index, row in enumerate(table):
            padded[index, : len(row)] = row
        table = padded
    if table.ndim != 2 or table.shape[0] != num_rows:
        raise ValueError(f"block_tables must be [{num_rows}, blocks], got {tuple(table.shape)}")
    return _to_device(table, torch.int32, device)
