"""How much of a prefix is worth loading, given what loading and computing it cost on this node. Pure."""

from __future__ import annotations

from collections.abc import Sequence


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
