"""What work takes by how much context there is, learned from steps. Pure."""

from __future__ import annotations

MEMORY = 0.98  # what each measurement leaves of those before; a guess
LEAST_SPREAD = 1e-3  # of what was measured, before a slope is told from noise; a guess
LEAST_BASE = 0.1  # share of the mean that is taken for independent of the context, at least; a guess
MOST_OFF = 3.0  # what took so many times what was expected was held up by something else; a guess


class Trend:
    """A straight line through measurements, newer ones weighing more: weighted least squares with forgetting."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def measured(self, context: float, seconds: float, weight: float = 1.0) -> None:
        if self._weight:
            seconds = min(seconds, MOST_OFF * self.at(context))
        sums = (1.0, context, seconds, context * context, context * seconds)
        known = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            MEMORY * old + weight * new for old, new in zip(known, sums, strict=True)
        )

    @property
    def line(self) -> tuple[float, float]:
        """Seconds without any context, and for each token of it; zeros: nothing measured."""
        if not self._weight:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x * self._x
        slope = 0.0
        if spread > LEAST_SPREAD * self._weight * self._xx:
            slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
            slope = min(slope, (1 - LEAST_BASE) * self._y / self._x)
        return (self._y - slope * self._x) / self._weight, slope

    def at(self, context: float) -> float:
        base, slope = self.line
        return base + slope * context
