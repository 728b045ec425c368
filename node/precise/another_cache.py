"""A model that is served from two caches at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem.engine.media.encoder import MediaEncoder, MediaInputs
from tandem.engine.running.runner_needs import Model
from tandem.kernels.api.attention import Attention
from tandem.kernels.products.rotary_attention import WantedTokens


class OverAnotherCache:
    """A model over a cache of its own, without its head, if it has one; everything else is the given model's.
    Implements `Model`."""

    group = expert_group = None
    encoder = None
    guess_head = None
    cross_layers: Mapping[str, Attention] = {}
    expert_counts = None  # those of the model are counted already

    def __init__(self, model: Model) -> None:
        self._model = model
        of_head = None if model.guess_head is None else model.guess_head.layer_name
        layers = model.attention_layers.items()
        self.attention_layers = {name: layer.over_another_cache() for name, layer in layers if name != of_head}

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: WantedTokens | None = None,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        if media is not None:
            return self._model(input_ids, positions, wanted, media)
        return self._model(input_ids, positions, wanted)

    def compile_forward(self) -> None:
        """Does nothing: what the given model is compiled to is called here, too."""

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def media_encoder(self) -> MediaEncoder | None:
        return self._model.media_encoder

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._model.project(hidden, out)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)
