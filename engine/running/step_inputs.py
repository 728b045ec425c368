"""Inputs of the forward pass, in device buffers that keep their addresses from step to step.

Shape legend: T tokens of the step, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.engine.device.upload import upload
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.encoder_spans import CrossInputs, EncoderSpans
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.scheduling.step import ScheduledRow, rows_follow
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder
from tandem.kernels.prefixes.shared_prefix import SharedPrefixes
from tandem.kernels.products.adapter_rows import AdapterRows, sorted_rows, tiles_of
from tandem.kernels.products.rotary_attention import WantedTokens

ALIGNED_WORDS = 4  # kernels are compiled for pointers to multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Inputs of one forward pass. Row i (in the scheduler's order) begins at `first_token_R[i]` of the T tokens and is
    row `place_R[i]` of the metadata, which has rows of one token first. Where layers keep KV in window blocks,
    `by_layer` has metadata with their block tables."""

    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    metadata: AttentionMetadata
    first_token_R: np.ndarray  # int64, host
    place_R: np.ndarray  # int64, host
    adapters: AdapterRows | None = None
    links_3T: torch.Tensor | None = None  # where a head finds features (heads/features.py)
    by_layer: Mapping[str, AttentionMetadata] | None = None


class StepInputs:
    """Builds ForwardInputs from rows. Rows of one token go first, as attention wants them."""

    def __init__(
        self,
        state: BatchState,
        max_num_tokens: int,
        builder: AttentionMetadataBuilder,
        sharing: PrefixSharing | None = None,
        spans: EncoderSpans | None = None,
        features: HeadFeatures | None = None,
        table_of: Mapping[str, int] | None = None,
    ) -> None:
        """`table_of`: each layer's block table, where there are several."""
        self._state = state
        self._table_of = dict(table_of or {})
        # The model's: a head's stands behind it.
        own = [name for name in self._table_of if features is None or name != features.head.layer_name]
        self._last_layer = own[-1] if own else ""
        self._features = features
        self._sharing = sharing
        self._spans = spans
        self._builder = builder
        device = state.device
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slot_mappings = [torch.zeros(max_num_tokens, dtype=torch.int64, device=device) for _ in state.tables_SB]

    def build(self, rows: Sequence[ScheduledRow]) -> ForwardInputs:
        """The rows' tokens, gathered from their slots' tables on the device; KV goes to the slots' blocks."""
        state = self._state
        order, lengths, position_T = _flatten(rows)
        slot_R = np.array([row.slot for row in rows], np.int64)[order]
        slot_R_dev, slot_T, position_T_dev = upload([slot_R, np.repeat(slot_R, lengths), position_T], state.device)
        input_ids, positions, slots = self.buffers(len(position_T))
        positions.copy_(position_T_dev)
        input_ids.copy_(state.token_ids_SC[slot_T, positions])
        ends = np.array([row.start for row in rows], np.int64)[order] + lengths
        block_tables = [table_SB[slot_R_dev] for table_SB in state.tables_SB]  # whole rows: kernels know their stride
        for table_SB, slots_T in zip(state.tables_SB, slots, strict=True):
            block_T = table_SB[slot_T, positions // state.block_size].to(torch.int64)
            torch.add(block_T * state.block_size, positions % state.block_size, out=slots_T)
        shared = None
        if self._sharing is not None:
            shared = self._sharing.of_rows([row for row in rows if row.num_tokens == 1])
        cross = None if self._spans is None else self._spans.of_rows(slot_R, slot_R_dev)
        metadata = self._build(lengths, ends, block_tables[0], slots[0], shared, cross, rows_follow(rows))
        by_layer = None
        if self._table_of:
            others = [
                replace(metadata, block_tables=tables, slot_mapping=slots_T, shared_prefixes=None, scratch={})
                for tables, slots_T in list(zip(block_tables, slots, strict=True))[1:]
            ]
            by_layer = {name: [metadata, *others][table] for name, table in self._table_of.items()}
        place_R = np.empty(len(rows), np.int64)
        place_R[order] = np.arange(len(rows))
        first_token_R = (np.cumsum(lengths) - lengths)[place_R]
        adapters = adapter_rows(state.settings["adapter"][slot_R], lengths, state.device)
        links = self._links(np.repeat(slot_R, lengths), position_T)
        return ForwardInputs(input_ids, positions, metadata, first_token_R, place_R, adapters, links, by_layer)

    def last_tokens(self, inputs: ForwardInputs, row_N: Sequence[int]) -> WantedTokens:
        """The last token of each of these rows (given in the scheduler's order), as decode rows of the last layer."""
        metadata, place_N = inputs.metadata, inputs.place_R[list(row_N)]
        if inputs.by_layer is not None:
            metadata = inputs.by_layer[self._last_layer]
        lengths, ends = np.array(metadata.query_lens_cpu)[place_N], np.array(metadata.seq_lens_cpu)[place_N]
        index_N = inputs.first_token_R[list(row_N)] + lengths - 1
        place_dev, index_dev = upload([place_N, index_N], self._state.device)
        tables, slots = metadata.block_tables[place_dev], metadata.slot_mapping[index_dev]
        return WantedTokens(
            index_dev, self._builder.build(np.ones(len(ends), np.int64), ends, tables, slots, self._state.device)
        )

    def build_dummy(self, rows: Sequence[ScheduledRow], adapter: int = 0) -> ForwardInputs:
        """Rows of token 0 that write no KV (slot -1) and read block 0 only; for warm-up and profiling. All take the
        adapter in this slot (0: none).

        Rows of one token come first.
        """
        device = self._state.device
        order, lengths, position_T = _flatten(rows)
        assert order.tolist() == list(range(len(rows))), "rows of one token come first"
        ends = np.array([row.start for row in rows], np.int64) + lengths
        input_ids, positions, slots = self.buffers(len(position_T))
        input_ids.zero_()
        positions.copy_(upload([position_T], device)[0])
        for slots_T in slots:
            slots_T.fill_(-1)
        block_tables = torch.zeros((len(rows), self._state.max_blocks), dtype=torch.int32, device=device)
        nothing = None
        if self._sharing is not None:  # its kernels are warmed up, too
            nothing = self._sharing.nothing(int((lengths == 1).sum()))
        cross = None if self._spans is None else self._spans.of_nobody(rows)
        metadata = self._build(lengths, ends, block_tables, slots[0], nothing, cross)
        adapters = adapter_rows(np.full(len(rows), adapter), lengths, device)
        first_token_R = np.cumsum(lengths) - lengths
        links = self._links(np.full(len(position_T), -1), position_T)
        return ForwardInputs(input_ids, positions, metadata, first_token_R, np.arange(len(rows)), adapters, links)

    def _links(self, slot_T: np.ndarray, position_T: np.ndarray) -> torch.Tensor | None:
        if self._features is None:
            return None
        [links_3T] = upload([self._features.links(slot_T, position_T)], self._state.device)
        return links_3T

    def _build(
        self,
        lengths: np.ndarray,
        ends: np.ndarray,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
        shared: SharedPrefixes | None,
        cross: CrossInputs | None,
        follows: bool = False,
    ) -> AttentionMetadata:
        return self._builder.build(
            lengths,
            ends,
            block_tables,
            slot_mapping,
            self._state.device,
            encoder_seq_lens=None if cross is None else cross.lengths,
            cross_block_tables=None if cross is None else cross.block_tables,
            shared_prefixes=shared,
            rows_follow=follows,
        )

    def buffers(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(token ids int32, positions int64, by block table cache slots int64), [num_tokens] each: where every step's
        inputs stand."""
        assert num_tokens <= len(self._positions), f"{num_tokens} tokens in a step of at most {len(self._positions)}"
        slots = [each[:num_tokens] for each in self._slot_mappings]
        return self._input_ids[:num_tokens], self._positions[:num_tokens], slots


def adapter_rows(adapter_R: np.ndarray, lengths: np.ndarray, device: torch.device) -> AdapterRows | None:
    """The order of rows of so many tokens, one row after another, each with the adapter in its slot (0: none).
    None: no row takes one."""
    if not adapter_R.any():
        return None
    words = sorted_rows(np.repeat(adapter_R, lengths))
    tiles = np.zeros((0, 3), np.int32) if (lengths == 1).all() else tiles_of(words[1])
    num_tokens, room = words.shape[1], -(-words.shape[1] // ALIGNED_WORDS) * ALIGNED_WORDS
    host = torch.zeros(2 * room + tiles.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    host[: 2 * room].view(2, room)[:, :num_tokens] = torch.from_numpy(words)
    host[2 * room :] = torch.from_numpy(tiles.ravel())
    sent = host.to(device, non_blocking=True)
    order, slots = sent[: 2 * room].view(2, room)[:, :num_tokens]
    return AdapterRows(order, slots, sent[2 * room :].view(-1, 3) if tiles.size else None)


def _flatten(rows: Sequence[ScheduledRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(order of the rows, their lengths in that order, the position of each token)."""
    lengths = np.array([row.num_tokens for row in rows], np.int64)
    order = np.argsort(lengths != 1, kind="stable")
    lengths = lengths[order]
    starts = np.array([row.start for row in rows], np.int64)[order]
    offset_T = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return order, lengths, np.repeat(starts, lengths) + offset_T
