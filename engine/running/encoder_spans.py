"""The encoder's part of steps: its positions are taken off sequences at the runner's door, so that all behind it (batch
state, graphs, sampling) sees the decoder's tokens alone, counted from 0.

A slot's leading blocks, those of its span, go into a table of their own, which cross attention reads. In a step whose
rows reach into a span, the encoder runs before the decoder does, and each layer's keys and values are stored there.

Shape legend: S slots, R rows, B block table columns, P positions of the encoder's output, E hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import EncoderFacts, span_length
from tandem.engine.device.upload import upload
from tandem.engine.scheduling.step import BlockAppend, ForkSlot, NewSlot, ScheduledRow, SchedulerOutput
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder, slots_of

KEPT_OUTPUTS = 4  # encoder outputs kept for the rest of a prompt that is computed in chunks; a guess


class Encoder(Protocol):
    """The encoder of a model, and what its decoder's layers keep of its output [P, E]."""

    @property
    def facts(self) -> EncoderFacts: ...

    def num_positions(self, item: MediaItem) -> int: ...

    def longest_input(self) -> MediaItem: ...

    def encode(self, item: MediaItem) -> torch.Tensor: ...

    def store(self, output: torch.Tensor, metadata: AttentionMetadata) -> None: ...


class SpanPart(NamedTuple):
    """Positions `start` to `end` of a slot's span, to be stored in this step."""

    slot: int
    start: int
    end: int


class CrossInputs(NamedTuple):
    """What metadata says of rows' encoders: lengths on the host, block tables int32 [R, B], and lengths int32 [R] on
    the device where the host's don't say them."""

    lengths: tuple[int, ...]
    block_tables: torch.Tensor
    lengths_on_device: torch.Tensor | None = None


class EncoderSpans:
    """Runs the encoder for the sequences in a runner's slots and says where each one's output lies in the pool."""

    def __init__(
        self,
        encoder: Encoder,
        num_slots: int,
        block_size: int,
        device: torch.device,
        builder: AttentionMetadataBuilder,
        counters: dict[str, int],
    ) -> None:
        """`counters` counts runs and stored positions."""
        self._encoder = encoder
        self._block_size = block_size
        self._device = device
        columns = span_length(encoder.facts.max_positions) // block_size
        self.max_positions = encoder.facts.max_positions
        self.block_table_SB = torch.zeros((num_slots, columns), dtype=torch.int32, device=device)
        self.lengths_S = torch.zeros(num_slots, dtype=torch.int32, device=device)  # 0: none yet
        self._host_table_SB = np.zeros((num_slots, columns), np.int32)
        self._host_lengths_S = np.zeros(num_slots, np.int64)
        self._spans_S = np.zeros(num_slots, np.int64)
        self._items: list[MediaItem | None] = [None] * num_slots
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._builder = builder
        self._counters = counters
        counters.update(encoder_runs=0, encoder_positions_stored=0)

    # --- at the door ----------------------------------------------------------------------------------------

    def take_off(self, output: SchedulerOutput) -> tuple[SchedulerOutput, list[SpanPart]]:
        """The step as the decoder has it, and what the encoder has to do before. Rows without a decoder's token are
        left out."""
        new_slots = tuple(map(self._enter, output.new_slots))
        forks = tuple(map(self._fork, output.forks))
        appends = tuple(each for each in map(self._append, output.block_appends) if each is not None)
        changed = {new.slot for new in new_slots} | {fork.slot for fork in forks}
        self._send(sorted(changed | {append.slot for append in output.block_appends if self._is_of_span(append)}))
        parts, rows, places = self._divide(output.rows)
        samples = tuple(
            msgspec.structs.replace(
                sample, row=places[sample.row], position=sample.position - int(self._spans_S[sample.slot])
            )
            for sample in output.samples
        )
        step = msgspec.structs.replace(
            output, rows=rows, samples=samples, new_slots=new_slots, forks=forks, block_appends=appends
        )
        return step, parts

    def _divide(
        self, scheduled: Sequence[ScheduledRow]
    ) -> tuple[list[SpanPart], tuple[ScheduledRow, ...], dict[int, int]]:
        """(the encoder's part of rows, the decoder's rows, which of them each row has become)."""
        parts: list[SpanPart] = []
        rows: list[ScheduledRow] = []
        places: dict[int, int] = {}
        for index, row in enumerate(scheduled):
            span, end = int(self._spans_S[row.slot]), row.start + row.num_tokens
            if row.start < span:
                parts.append(SpanPart(row.slot, row.start, min(end, span)))
            if end > span:
                places[index] = len(rows)
                start = max(row.start, span)
                rows.append(msgspec.structs.replace(row, start=start - span, num_tokens=end - start))
        return parts, tuple(rows), places

    def _enter(self, new: NewSlot) -> NewSlot:
        [item] = new.media
        slot, num_blocks = new.slot, item.length // self._block_size
        self._items[slot], self._spans_S[slot] = item, item.length
        self._host_lengths_S[slot] = self._encoder.num_positions(item)
        leading = new.block_ids[:num_blocks]
        self._host_table_SB[slot, : len(leading)] = leading
        return msgspec.structs.replace(
            new,
            token_ids=new.token_ids[item.length :],
            num_prompt_tokens=new.num_prompt_tokens - item.length,
            block_ids=new.block_ids[num_blocks:],
            media=(),
        )

    def _fork(self, fork: ForkSlot) -> ForkSlot:
        slot, parent = fork.slot, fork.parent_slot
        self._items[slot], span = self._items[parent], int(self._spans_S[parent])
        for table in (self._spans_S, self._host_lengths_S, self._host_table_SB):
            table[slot] = table[parent]
        return msgspec.structs.replace(
            fork, num_tokens=fork.num_tokens - span, block_ids=fork.block_ids[span // self._block_size :]
        )

    def _append(self, append: BlockAppend) -> BlockAppend | None:
        """The patch as the decoder's table gets it; None for a block of the slot's span, which is put into the span's
        table."""
        if self._is_of_span(append):
            self._host_table_SB[append.slot, append.index] = append.block_id
            return None
        num_blocks = int(self._spans_S[append.slot]) // self._block_size
        return msgspec.structs.replace(append, index=append.index - num_blocks)

    def _is_of_span(self, append: BlockAppend) -> bool:
        return append.index < int(self._spans_S[append.slot]) // self._block_size

    def _send(self, slots: Sequence[int]) -> None:
        """Brings the tables of these slots to the device, in one copy."""
        if slots:
            index = np.array(slots, np.int64)
            at, table, lengths = upload(
                [index, self._host_table_SB[index].astype(np.int64), self._host_lengths_S[index]], self._device
            )
            self.block_table_SB.index_copy_(0, at, table.to(torch.int32))
            self.lengths_S.index_copy_(0, at, lengths.to(torch.int32))

    # --- before the decoder ---------------------------------------------------------------------------------

    def compute(self, parts: Iterable[SpanPart]) -> None:
        """Runs the encoder for these parts, and stores what each layer keeps of its output. Positions that only fill a
        span up hold nothing."""
        for part in parts:
            num_positions = int(self._host_lengths_S[part.slot])
            end = min(part.end, num_positions)
            if part.start >= end:
                continue
            item = self._items[part.slot]
            assert item is not None, "a span without an input"
            output_PE = self._output(item, is_last=end == num_positions)
            slots = slots_of(self._host_table_SB[part.slot], part.start, end - part.start, self._block_size)
            lengths = [end - part.start]
            table = self._host_table_SB[part.slot][None]
            metadata = self._builder.build(lengths, lengths, table, slots, self._device)
            self._encoder.store(output_PE[part.start : end], metadata)
            self._counters["encoder_positions_stored"] += end - part.start

    def _output(self, item: MediaItem, is_last: bool) -> torch.Tensor:
        """The encoder's output for an item, [P, E]; made anew unless an earlier chunk of the same input needed it."""
        output_PE = self._kept.pop(item.digest, None)
        if output_PE is None:
            output_PE = self._encoder.encode(item)
            self._counters["encoder_runs"] += 1
        if not is_last:
            self._kept[item.digest] = output_PE
            while len(self._kept) > KEPT_OUTPUTS:
                self._kept.popitem(last=False)
        return output_PE

    # --- for metadata ---------------------------------------------------------------------------------------

    def of_rows(self, slot_R: np.ndarray, on_device_R: torch.Tensor) -> CrossInputs:
        """The encoders of rows of these slots."""
        return CrossInputs(tuple(self._host_lengths_S[slot_R].tolist()), self.block_table_SB[on_device_R])

    def of_slots(self, slot_R: torch.Tensor) -> CrossInputs:
        """The encoders of rows of these slots, int64 on the device; padding rows, of slot -1, have none. The host's
        lengths are the longest that can be."""
        real_R = slot_R.clamp(min=0)
        lengths_R = self.lengths_S[real_R] * (slot_R >= 0)
        longest = (self.max_positions,) * len(slot_R)
        return CrossInputs(longest, self.block_table_SB[real_R], lengths_R)

    def of_nobody(self, rows: Sequence[ScheduledRow]) -> CrossInputs:
        """Inputs for the rows of a warm-up: as long as any can be, all of it in block 0."""
        table = torch.zeros((len(rows), self.block_table_SB.shape[1]), dtype=torch.int32, device=self._device)
        return CrossInputs((self.max_positions,) * len(rows), table)

    def warm_up(self) -> None:
        """Runs the encoder over its longest input, and stores nothing of it."""
        item = self._encoder.longest_input()
        output_PE, nowhere = self._encoder.encode(item), np.full(self.max_positions, -1, np.int64)
        lengths = [self.max_positions]
        table = np.zeros((1, self.block_table_SB.shape[1]), np.int32)
        self._encoder.store(output_PE, self._builder.build(lengths, lengths, table, nowhere, self._device))
