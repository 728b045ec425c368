"""How often the garbage collector looks through what a process makes."""

from __future__ import annotations

import gc

STARTING, SERVING = (50_000, 20, 100), (50_000, 20, 1_000)  # guesses


def collect_rarely() -> None:
    """Has it look rarely. To be called before torch is imported: what that makes stays, as does what transformers'
    modules make, and to look through it again and again would be a tenth of a start, or a fifth."""
    gc.set_threshold(*STARTING)


def settle(*thresholds: int) -> None:
    """Has it never look again through what start-up made, and rarely through what serving makes: by these thresholds,
    of which those left out stay, or by a node's."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(thresholds or SERVING))
