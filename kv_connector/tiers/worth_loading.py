"""Decides how much of a prefix is worth loading, by the cost of loading and computing on this node. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def num_worth_loading(load_seconds: Sequence[float], compute_seconds: float) -> int:
    """How many leading blocks to load, given the seconds to load each and the seconds to compute one (0: unknown).

    Returns the number with the least total time, the largest among equals; all if the compute time is unknown.
    """
    if not compute_seconds:
        return len(load_seconds)
    best, best_saved, saved = 0, 0.0, 0.0
    for count, seconds in enumerate(load_seconds, start=1):
        saved += compute_seconds - seconds
        if saved >= best_saved:
            best, best_saved = count, saved
    return best
