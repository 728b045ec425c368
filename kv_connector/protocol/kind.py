"""The kinds of hand-offs."""

from __future__ import annotations

import enum


class HandoffKind(enum.Enum):
    """What is handed from source to sink."""

    PROMPT = "prompt"  # pushed while it is computed, for a request that goes on at the sink
    PULL = "pull"  # cached blocks that the sink has asked for
    CHUNK = "chunk"  # of a prompt that several nodes compute: the same for one of them; a pull to its sink
    SEQUENCE = "sequence"  # runs at its source meanwhile: its length is known when it stands still
