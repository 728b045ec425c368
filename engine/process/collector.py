"""How often the garbage collector looks through what a process makes while it starts."""

from __future__ import annotations

import gc

STARTING = (50_000, 20, 100)  # guesses


def collect_rarely() -> None:
    """Has it look rarely. To be called before torch is imported: what that makes stays, as does what transformers'
    modules make, and to look through it again and again would be a tenth of a start, or a fifth."""
    gc.set_threshold(*STARTING)
