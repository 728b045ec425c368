"""What the host tells the device of a replayed step: which slots are in it, and where each of them is.

Shape legend: R rows of the step, G rows of its graph, W words a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tandem.engine.scheduling.step import ScheduledRow

SLOT, POSITION, LINKS = 0, 1, 2  # places of words; from LINKS on what a head asks for


class StepWords:
    """Static device buffers int64 [W, G], one for each size of graphs. A step whose words the step before has left
    there sends nothing: rows that go on where they were have their positions advanced by the kernel that draws."""

    def __init__(
        self, device: torch.device, links_of: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    ) -> None:
        """`links_of`: slots and positions [G] -> three more words a row, where a head reads features."""
        self._device = device
        self._links_of = links_of
        self._buffers: dict[int, torch.Tensor] = {}
        # What a buffer holds when all that was launched has run, where that is known.
        self._held: dict[int, np.ndarray] = {}
        self._size = 0

    def buffer(self, size: int) -> torch.Tensor:
        """The words of graphs of `size` rows; some more columns than rows, in one run of memory, so that one copy
        fills it."""
        if size not in self._buffers:
            # Kernels are compiled for addresses that are multiples of 16 bytes.
            shape = (2 if self._links_of is None else 5, -(-size // 2) * 2)
            with torch.inference_mode(False):  # so that it may be filled anywhere
                self._buffers[size] = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return self._buffers[size]

    def fill(self, rows: Sequence[ScheduledRow], size: int) -> None:
        """Has the buffer hold the step's slots and the position of each one's newest token; -1 and 0 of padding. The
        copy, if there is one, doesn't wait."""
        buffer, num_rows = self.buffer(size), len(rows)
        words = np.empty(buffer.shape, np.int64)
        words[:2, :num_rows] = [row.slot for row in rows], [row.start for row in rows]
        words[SLOT, num_rows:], words[POSITION, num_rows:] = -1, 0
        if self._links_of is not None:
            words[LINKS:] = self._links_of(words[SLOT], words[POSITION])
        self._size = size
        held = self._held.get(size)
        if held is not None and np.array_equal(held, words):
            return
        sent = torch.from_numpy(words)
        if self._device.type == "cuda":
            sent = sent.pin_memory()
        buffer.copy_(sent, non_blocking=True)
        self._held[size] = words

    def newest(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions of the first rows of the step that was filled last."""
        buffer = self._buffers[self._size]
        return buffer[SLOT, :num_rows], buffer[POSITION, :num_rows]

    def advance(self, num_rows: int, launch: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Has `launch` enqueue what adds one to the positions of rows whose slot isn't -1."""
        held = self._held.pop(self._size)  # so that nothing is taken as known if that fails
        launch(*self.newest(num_rows))
        held[POSITION, :num_rows] += held[SLOT, :num_rows] >= 0
        self._held[self._size] = held
