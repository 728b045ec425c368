"""How long things took on a node, as its status counts it: a sum, and how often it was at most so long."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

# Upper bounds in seconds, the same for all that is timed, so that readers of a status know them; guesses.
BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, float("inf"))


@cache
def bucket_keys(name: str) -> tuple[str, ...]:
    """The counters in which `name` is counted, one for each of BOUNDS_S: each time in the first that it fits."""
    return tuple(f"{name}<={bound:g}" for bound in BOUNDS_S)


def note_duration(counters: dict[str, float], name: str, seconds: float) -> None:
    """Counts one duration. Its sum is the counter `name`; a counter that never counted isn't there, and costs a status
    nothing."""
    counters[name] = counters.get(name, 0.0) + seconds
    key = bucket_keys(name)[bisect_left(BOUNDS_S, seconds)]
    counters[key] = counters.get(key, 0.0) + 1.0
