"""What one unit of some work takes, smoothed over measurements. Pure."""

from __future__ import annotations

SMOOTHING = 0.2  # a guess: the weight of the newest measurement
FORGETTING = 0.98  # a guess: what each `doubt` leaves of a rate


class Rate:
    """Seconds for each unit (a block, a token); 0: nothing measured yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, num: int, seconds: float) -> None:
        if num:
            each = seconds / num
            self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each

    def doubt(self) -> None:
        """Lowers the rate a little. To be called when the rate kept us from work that would have measured it again."""
        self.seconds *= FORGETTING
