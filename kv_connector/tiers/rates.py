"""What loading and computing cost, as measured on this node, and so how much of a prefix is worth loading. Pure."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.2
FORGETTING = 0.98  # a rate that makes us decline is believed a little less each time: it would never be measured again


class Rate:
    """Seconds for each unit (a block, a token); 0: nothing measured yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, num: int, seconds: float) -> None:
        if num:
            each = seconds / num
            self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each

    def doubt(self) -> None:
        self.seconds *= FORGETTING


def num_worth_loading(load_seconds: Sequence[float], compute_seconds: float) -> int:
    """How many leading blocks to load, given what loading each takes and what computing one takes (0: unknown).

    The number with the least total time; among equals the largest. All, when it is not known what computing takes.
    """
    if not compute_seconds:
        return len(load_seconds)
    best, best_saved, saved = 0, 0.0, 0.0
    for count, seconds in enumerate(load_seconds, start=1):
        saved += compute_seconds - seconds
        if saved >= best_saved:
            best, best_saved = count, saved
    return best
