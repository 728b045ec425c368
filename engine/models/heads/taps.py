"""What a model and a head that guesses from its hidden states need of each other.

Legend: T tokens of the step, R rows, E hidden size, V vocabulary of the model, W the head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tandem.engine.contracts.model_shape import ModelShape
from tandem.engine.parallel.group import TensorParallel
from tandem.kernels.api.attention import Attention


class FeatureTaps:
    """Takes the residual stream where it enters some of a model's layers, of each pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: their numbers, rising. The number behind the last layer's stands for what leaves the last norm."""
        self.layers = tuple(layers)
        self._taken: list[torch.Tensor] = []

    def take(self, layer: int, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> None:
        """Called before each layer, with the two parts of its input. Copies, since layers add to them in place."""
        if layer == self.layers[0]:  # of a new pass; nobody asked for what the one before left
            self._taken.clear()
        if layer in self.layers:
            self._taken.append(residual_TE.clone() if x_TE is None else x_TE + residual_TE)

    def taken(self) -> torch.Tensor:
        """[T, layers * E] of the newest pass, once."""
        taken, self._taken = self._taken, []
        assert len(taken) == len(self.layers), "a pass did not go through the layers"
        return torch.cat(taken, dim=-1)


class GuessHead(Protocol):
    """A head as the model and its runner use it. Its keys and values are one more layer of the pool."""

    layer_name: str
    group: TensorParallel | None  # ranks that have a share of it each
    attention: Attention
    taps: FeatureTaps
    num_speculative_tokens: int
    dtype: torch.dtype
    token_W: torch.Tensor  # int64 [W]: the model's number of each token of its vocabulary

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """The model's."""
        ...

    def fuse(self) -> torch.Tensor:
        """The features [T, E] of the tokens of the pass that has just run."""

    def store(self, token_T: torch.Tensor, feature_TE: torch.Tensor, position_T: torch.Tensor) -> None:
        """Stores keys and values of tokens, each with the feature of the token before it. Within a forward context."""

    def __call__(self, token_R: torch.Tensor, feature_RE: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        """[R, E]: what stands for the features of these tokens. Stores their keys and values, too."""

    def project(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> logits [R, W] of what follows these tokens."""


class HeadedModel(Protocol):
    """A model as a head of EAGLE-3 needs it."""

    @property
    def config(self) -> ModelShape: ...

    @property
    def group(self) -> TensorParallel | None: ...

    @property
    def embedding_VE(self) -> torch.Tensor: ...

    def take_guess_head(self, head: GuessHead) -> None:
        """Has passes leave their features for a head. Raises ConfigError where it has none to give."""
