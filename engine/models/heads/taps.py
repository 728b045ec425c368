"""What a model and a head that guesses from its hidden states need of each other.

Legend: T tokens of the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tandem.kernels.api.attention import Attention


class FeatureTaps:
    """Takes the residual stream where it enters some of a model's layers, of each pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: their numbers, rising."""
        self.layers = tuple(layers)
        self._taken: list[torch.Tensor] = []

    def take(self, layer: int, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> None:
        """Called before each layer, with the two parts of its input. Copies, since layers add to them in place."""
        if layer in self.layers:
            self._taken.append(residual_TE.clone() if x_TE is None else x_TE + residual_TE)

    def taken(self) -> torch.Tensor:
        """[T, layers * E] of the newest pass, once."""
        taken, self._taken = self._taken[-len(self.layers) :], []
        assert len(taken) == len(self.layers), "a pass did not go through the layers"
        return torch.cat(taken, dim=-1)


class GuessHead(Protocol):
    """A head as the model and its runner use it. Its keys and values are one more layer of the pool."""

    layer_name: str
    attention: Attention
    taps: FeatureTaps

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_speculative_tokens(self) -> int: ...

    def fuse(self) -> torch.Tensor:
        """The features [T, E] of the tokens of the pass that has just run."""

    def store(self, token_T: torch.Tensor, feature_TE: torch.Tensor, position_T: torch.Tensor) -> None:
        """Stores keys and values of tokens, each with the feature of the token before it. Within a forward context."""
