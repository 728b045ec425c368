"""The items of the sequences in a runner's slots, and what they are to the rows of a step.

Shape legend: T tokens of a forward pass, M of them in spans, S slots, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.device.upload import upload
from tandem.engine.media.encoder import EncodeError, MediaEncoder, MediaInputs
from tandem.engine.media.encoder_outputs import EncoderOutputs
from tandem.engine.scheduling.step import ForkSlot, NewSlot, ScheduledRow


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The items of one sequence, none once its rows are behind all of them: their tensors are large. `positions_3C`: of
    its tokens up to `end`, the last item's; after that they are `shift` more than the token's own. None: the model
    counts tokens alone."""

    items: tuple[MediaItem, ...]
    end: int
    positions_3C: np.ndarray | None
    shift: int

    def positions(self, row: ScheduledRow) -> np.ndarray:
        """Positions of these tokens, int64 [3, num_tokens]."""
        assert self.positions_3C is not None
        end = row.start + row.num_tokens
        known = self.positions_3C[:, row.start : end]
        after = np.arange(row.start + known.shape[1], end) + self.shift
        return np.concatenate((known, np.broadcast_to(after, (3, len(after)))), axis=1)


def make_media_slots(
    encoder: MediaEncoder | None, num_slots: int, budget_bytes: int, device: torch.device
) -> MediaSlots | None:
    """The slots for items of all sequences; None: the model takes text alone."""
    return None if encoder is None else MediaSlots(encoder, num_slots, budget_bytes, device)


class MediaSlots:
    """The items of all slots; one per runner of a model that takes more than text."""

    def __init__(self, encoder: MediaEncoder, num_slots: int, budget_bytes: int, device: torch.device) -> None:
        self._encoder, self._device = encoder, device
        self.outputs = EncoderOutputs(encoder, budget_bytes)
        self._sequences: dict[int, _Sequence] = {}
        # By how much positions exceed the tokens' places after a sequence's last item; decode steps gather it.
        self.shift_S = torch.zeros(num_slots, dtype=torch.int64, device=device) if encoder.has_positions else None

    def apply(self, new_slots: Sequence[NewSlot]) -> dict[int, str]:
        """Takes in sequences that enter slots. Returns slot -> why its items can't be used; such a slot is computed as
        one without, and its tokens must be dropped."""
        failed = {}
        for new in new_slots:
            self._sequences.pop(new.slot, None)
            try:
                if new.media:
                    self._sequences[new.slot] = self._sequence(new.media)
            except EncodeError as error:
                failed[new.slot] = str(error)
        self._send_shifts([new.slot for new in new_slots])
        return failed

    def fork(self, forks: Sequence[ForkSlot]) -> None:
        """Makes slots copies of their parents."""
        for fork in forks:
            self._sequences.pop(fork.slot, None)
            if fork.parent_slot in self._sequences:
                self._sequences[fork.slot] = self._sequences[fork.parent_slot]
        self._send_shifts([fork.slot for fork in forks])

    def has_items(self, slot: int) -> bool:
        """Whether the slot's sequence had items, even if all its rows to come are behind them."""
        return slot in self._sequences

    def touch(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether some of these rows' tokens lie before an item's end, so that the step takes more than their ids."""
        return any(row.slot in self._sequences and row.start < self._sequences[row.slot].end for row in rows)

    def of(
        self, rows: Sequence[ScheduledRow], first_token_R: np.ndarray, positions_T: torch.Tensor
    ) -> MediaInputs | None:
        """What the rows' items are to a forward pass in which row i begins at token `first_token_R[i]`; None: nothing.
        Raises what the encoder raises."""
        starts = zip(rows, first_token_R.tolist(), strict=True)
        within = [(row, at) for row, at in starts if row.slot in self._sequences]
        index: list[np.ndarray] = []
        parts: list[torch.Tensor] = []
        for row, at in within:
            sequence = self._sequences[row.slot]
            if sequence.items and row.start >= sequence.end:
                self._sequences[row.slot] = replace(sequence, items=())
            for item in sequence.items:
                start, end = max(item.start, row.start), min(item.end, row.start + row.num_tokens)
                if start < end:
                    index.append(np.arange(start, end) - row.start + at)
                    parts.append(self.outputs.of(item)[start - item.start : end - item.start])
        positions_3T = self._positions(within, positions_T)
        if not parts:
            return None if positions_3T is None else MediaInputs(None, None, positions_3T)
        [index_M] = upload([np.concatenate(index)], self._device)
        return MediaInputs(index_M, torch.cat(parts), positions_3T)

    def _positions(self, within: list[tuple[ScheduledRow, int]], positions_T: torch.Tensor) -> torch.Tensor | None:
        if self.shift_S is None or not within:
            return None
        positions_3T = positions_T.expand(3, -1).clone()
        for row, at in within:
            [sent] = upload([self._sequences[row.slot].positions(row)], self._device)
            positions_3T[:, at : at + row.num_tokens] = sent
        return positions_3T

    def _sequence(self, items: tuple[MediaItem, ...]) -> _Sequence:
        if self.shift_S is None:
            return _Sequence(items, items[-1].end, None, 0)
        positions_3C, end, shift = np.empty((3, items[-1].end), np.int64), 0, 0
        for item in items:
            positions_3C[:, end : item.start] = np.arange(end, item.start) + shift
            own = self._encoder.positions(item)
            positions_3C[:, item.start : item.end] = own + item.start + shift
            shift += int(own.max()) + 1 - item.length
            end = item.end
        return _Sequence(items, end, positions_3C, shift)

    def _send_shifts(self, slots: list[int]) -> None:
        if self.shift_S is None or not slots:
            return
        shifts = [self._sequences[slot].shift if slot in self._sequences else 0 for slot in slots]
        slot_N, shift_N = upload([np.array(slots, np.int64), np.array(shifts, np.int64)], self._device)
        self.shift_S[slot_N] = shift_N
