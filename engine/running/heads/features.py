"""What a head that guesses needs of every pass of its model: the newest features of each slot, and its own keys.

Of each token of a step the head's keys and values are stored beside the model's. They are made of the token and the
feature of the token before it: a row of the same step, or one that was computed before, whose feature is kept here by
slot, in a ring of as many places as a step's drafts may set back. Where the keys before a row came from elsewhere (a
hand-over, a cache) there is none, and zeros stand for it: of one entry a sequence.

Legend: T rows, S slots, P places, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.engine.device.upload import upload
from tandem.engine.scheduling.step import ForkSlot, NewSlot

if TYPE_CHECKING:
    from tandem.engine.models.heads.taps import GuessHead


# Up to so many rows Python is faster than numpy, whose twenty calls took 130 us of a step beside an H200
# (docs/measurements.md#an-eagle-head); the device waits for this.
FEW_ROWS = 64


class HeadFeatures:
    """The features of one runner's slots."""

    def __init__(self, head: GuessHead, num_slots: int, device: torch.device) -> None:
        self.head = head
        self._device = device
        self._num_slots = num_slots
        # The newest token's, those of the drafts behind it, and the one before it.
        self._num_places = head.num_speculative_tokens + 2
        shape = (num_slots + 1, self._num_places)  # one slot more, for rows of nobody
        self._ring_SPE = torch.zeros((*shape, head.hidden_size), dtype=head.dtype, device=device)
        self._position_SP = torch.full(shape, -1, dtype=torch.int64, device=device)

    def forget(self, new_slots: Sequence[NewSlot]) -> None:
        """Slots that others enter hold nothing."""
        if new_slots:
            [slots] = upload([np.array([new.slot for new in new_slots], np.int64)], self._device)
            self._position_SP.index_fill_(0, slots, -1)

    def fork(self, forks: Sequence[ForkSlot]) -> None:
        for fork in forks:
            self._ring_SPE[fork.slot] = self._ring_SPE[fork.parent_slot]
            self._position_SP[fork.slot] = self._position_SP[fork.parent_slot]

    def links(self, slot_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
        """int64 [3, T], on the host: of each row the row of the same step that holds the token before (-1: none), the
        place where that token's feature is otherwise, and the place for its own. Slots below 0 are nobody's."""
        if len(slot_T) <= FEW_ROWS:
            return self._links_of_few(slot_T.tolist(), position_T.tolist())
        nowhere = self._num_slots * self._num_places
        key_T = slot_T * (1 << 32) + position_T
        order = np.argsort(key_T, kind="stable")
        ranked = key_T[order]
        before_T = np.full(len(key_T), -1, np.int64)
        follows = np.flatnonzero((np.diff(ranked) == 1) & (slot_T[order[1:]] >= 0)) + 1
        before_T[order[follows]] = order[follows - 1]
        # Of a row whose place a later row of the step takes, nothing is kept.
        later = np.searchsorted(ranked, key_T + self._num_places)
        is_last_T = (later >= len(ranked)) | (ranked[np.minimum(later, len(ranked) - 1)] != key_T + self._num_places)
        source_T = np.where(slot_T < 0, nowhere, self._place(slot_T, position_T - 1))
        own_T = np.where((slot_T < 0) | ~is_last_T, nowhere, self._place(slot_T, position_T))
        return np.stack([before_T, source_T, own_T])

    def _links_of_few(self, slots: list[int], positions: list[int]) -> np.ndarray:
        nowhere, places = self._num_slots * self._num_places, self._num_places
        row_of = {each: row for row, each in enumerate(zip(slots, positions, strict=True)) if each[0] >= 0}
        links = np.full((3, len(slots)), nowhere, np.int64)
        links[0] = -1
        for (slot, position), row in row_of.items():
            links[0, row] = row_of.get((slot, position - 1), -1)
            links[1, row] = slot * places + (position - 1) % places
            if (slot, position + places) not in row_of:
                links[2, row] = slot * places + position % places
        return links

    def note(self, token_T: torch.Tensor, position_T: torch.Tensor, links_3T: torch.Tensor) -> None:
        """Takes in a pass of the model that has just run, within its forward context. Stores the head's keys."""
        fused_TE = self.head.fuse()
        before_T, source_T, own_T = links_3T
        earlier_TE = self._at(source_T, position_T - 1)
        feature_TE = torch.where((before_T >= 0)[:, None], fused_TE[before_T.clamp_min(0)], earlier_TE)
        self._ring_SPE.view(-1, self.head.hidden_size).index_copy_(0, own_T, fused_TE)
        self._position_SP.view(-1).index_copy_(0, own_T, position_T)
        self.head.store(token_T, feature_TE, position_T)

    def of(self, slot_R: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        """The features [R, E] of the tokens at these positions of slots; zeros of those that aren't kept."""
        places = self._num_places
        slot_R = slot_R.masked_fill(slot_R < 0, self._num_slots)
        return self._at(slot_R * places + position_R.remainder(places), position_R)

    def _at(self, place_T: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        is_kept_T = self._position_SP.view(-1)[place_T] == position_T
        feature_TE = self._ring_SPE.view(-1, self.head.hidden_size)[place_T]
        return torch.where(is_kept_T[:, None], feature_TE, torch.zeros_like(feature_TE))

    def _place(self, slot_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
        places: np.ndarray = slot_T * self._num_places + position_T % self._num_places
        return places
