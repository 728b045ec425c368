"""How often the garbage collector looks through what a process makes while it starts."""

from __future__ import annotations

import gc

STARTING = (50_000, 20, 100)  # guesses


def collect_rarely() -> None:
    """To be called before torch is imported: what it and transformers make as they are imported stays, and to look
    through it again and again is a tenth of a start, a fifth where transformers' modules are imported."""
    gc.set_threshold(*STARTING)
