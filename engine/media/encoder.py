"""What encodes the items of prompts, and what a forward pass is given of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tandem.engine.contracts.wire.media import MediaItem


class EncodeError(Exception):
    """An item can't be encoded. A model's own processor makes no such item."""


class MediaEncoder(Protocol):
    """The part of a model that makes embeddings of items."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of items that it takes."""

    @property
    def has_positions(self) -> bool:
        """Whether tokens of items have positions of three dimensions (M-RoPE)."""

    def encode(self, item: MediaItem) -> torch.Tensor:
        """Embeddings of the item's span [length, E], on the model's device and in its dtype. Raises EncodeError,
        OutOfMemoryError."""

    def positions(self, item: MediaItem) -> np.ndarray:
        """Positions of the span's tokens, int64 [3, length], counted from its own beginning. Text after it goes on
        behind the largest. Raises EncodeError."""


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """What takes the place of token embeddings and positions in a forward pass over T tokens."""

    index_M: torch.Tensor | None  # int64: of the T tokens; None: this pass has no token of an item
    embedding_ME: torch.Tensor | None
    positions_3T: torch.Tensor | None  # int64; None: as the tokens are counted
