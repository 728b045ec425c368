"""The board on which the step loop shows its state to other threads."""

from __future__ import annotations

import math
import time

import msgspec

from tandem.engine.contracts.wire.connection import Status

STUCK_S = 120.0  # longer than any turn takes, even with a step or a kernel that is compiled late; a guess


class LoopBoard:
    """What the step loop writes and any thread reads. `status` is its newest report, replaced as a whole."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self._turned_at = self._shown_at = math.inf

    def show(self, status: Status) -> None:
        self.status, self._shown_at = status, time.monotonic()

    def answer(self, sequence: int) -> Status:
        """The newest report as the answer to ping `sequence`."""
        assert self.status is not None, "it was there when the other threads started"
        age_s = max(0.0, time.monotonic() - self._shown_at)
        return msgspec.structs.replace(self.status, sequence=sequence, age_s=age_s)

    def turn_begins(self) -> None:
        self._turned_at = time.monotonic()

    def is_stuck(self) -> bool:
        """Whether a turn takes longer than any step, such as when the device or a rank that was stopped never answers.
        Nothing here can end that; the node must be given up."""
        return time.monotonic() - self._turned_at > STUCK_S
