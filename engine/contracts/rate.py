"""What one unit of some work takes, smoothed over measurements. Pure."""

from __future__ import annotations

SMOOTHING = 0.2  # a guess: a newest measurement counts for so much
FORGETTING = 0.98  # a guess


class Rate:
    """Seconds for each unit (a block, a token); 0: nothing measured yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, num: int, seconds: float) -> None:
        if num:
            each = seconds / num
            self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each

    def doubt(self) -> None:
        """Believes a rate that kept us from the work a little less each time: else it would never be measured again."""
        self.seconds *= FORGETTING
