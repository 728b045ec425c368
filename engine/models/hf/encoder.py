"""The encoder of an encoder-decoder of transformers, and what the decoder's layers keep of its output.

The encoder runs by transformers' own attention, one input at a time. Each layer's cross attention makes keys and values
of its output once; they are stored in the blocks that stand for the input, at the place of the layer's own ones.

Shape legend: P positions of the encoder's output, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.engine.contracts.wire.encoder import encoder_input
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import EncoderFacts
from tandem.engine.models.hf.attention import NAME, is_storing, recorded, step_positions, storing
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.metadata import AttentionMetadata

OWN_ATTENTION = "sdpa"
PROJECTIONS = ("k_proj", "v_proj", "k", "v")  # what transformers' modules call those of keys and values


class HFEncoder:
    """A model's encoder with the projections of its cross attention. Keeps nothing between calls."""

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, facts: EncoderFacts) -> None:
        self._encoder: Any = model.get_encoder()
        self._modules = cross_modules(decoder)
        self._parameter = next(self._encoder.parameters())
        self.facts = facts
        for module in self._modules:
            for name in PROJECTIONS:
                if isinstance(getattr(module, name, None), nn.Linear):
                    projection = getattr(module, name)
                    projection.forward = _WhileStoring(projection, decoder.config)
        embedding: Any = getattr(decoder, "embed_positions", None)
        if embedding is not None:
            embedding.forward = _StepPositions(embedding.forward)

    def attend_by(self, layers: Mapping[str, Attention]) -> None:
        """Gives each of the decoder's layers its attention over the encoder's output, in their order."""
        for module, layer in zip(self._modules, layers.values(), strict=True):
            module.tandem_cross = layer

    @property
    def no_output(self) -> torch.Tensor:
        """What the decoder is given in place of the encoder's output [1, 1, E], which it finds in the cache."""
        return self._parameter.new_zeros(1, 1, self._encoder.config.hidden_size)

    def num_positions(self, item: MediaItem) -> int:
        if self.facts.kind == "audio":
            return self.facts.max_positions
        return next(tensor.shape[-1] for tensor in item.tensors if tensor.name == "input_ids")

    def longest_input(self) -> MediaItem:
        longest = self.facts.max_positions
        return encoder_input(longest, self.made_up(longest))

    def made_up(self, num_positions: int, generator: torch.Generator | None = None) -> dict[str, npt.NDArray]:
        """The arrays of an input that says nothing, whose output has so many positions."""
        config = self._encoder.config
        if self.facts.kind == "audio":
            frames = 2 * self.facts.max_positions  # the second convolution halves them
            shape = (1, int(config.num_mel_bins), frames)
            return {"input_features": torch.randn(shape, generator=generator).numpy()}
        return {"input_ids": torch.randint(0, int(config.vocab_size), (1, num_positions), generator=generator).numpy()}

    def encode(self, item: MediaItem) -> torch.Tensor:
        """The encoder's output for one input, [P, E]."""
        device, dtype, config = self._parameter.device, self._parameter.dtype, self._encoder.config
        arguments = {name: torch.from_numpy(array.copy()).to(device) for name, array in item.arrays().items()}
        arguments = {name: each.to(dtype) if each.is_floating_point() else each for name, each in arguments.items()}
        before, config._attn_implementation = config._attn_implementation, OWN_ATTENTION
        try:
            output_PE: torch.Tensor = self._encoder(**arguments).last_hidden_state[0]
        finally:
            config._attn_implementation = before
        return output_PE

    def store(self, output_PE: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Stores the keys and values that each layer makes of these positions, in the slots of `metadata`."""
        with storing(metadata):
            for module in self._modules:
                module(hidden_states=output_PE[None, :1], key_value_states=output_PE[None])


def cross_modules(decoder: PreTrainedModel) -> list[Any]:
    """The modules of a decoder that attend to the encoder's output, in the order of layers."""
    config: Any = decoder.config
    weight = next(decoder.parameters())
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=weight.device)
    states = weight.new_zeros(1, 3, config.hidden_size)
    with torch.inference_mode(), recorded() as calls:
        decoder(input_ids=tokens, encoder_hidden_states=states, use_cache=False)
    return [call.module for call in calls if call.is_cross]


class _WhileStoring:
    """A projection of the encoder's output that is computed when keys and values are stored, and not at each step."""

    def __init__(self, projection: nn.Linear, config: PreTrainedConfig) -> None:
        self._own_forward, self._width, self._config = projection.forward, projection.out_features, config

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if is_storing() or self._config._attn_implementation != NAME:
            return self._own_forward(states)
        return states.new_zeros(*states.shape[:-1], self._width)


class _StepPositions:
    """An embedding of positions that takes those of the step's tokens, which models with an encoder would count from
    the beginning of the row."""

    def __init__(self, own_forward: Any) -> None:
        self._own_forward = own_forward

    def __call__(self, *args: Any, **more: Any) -> torch.Tensor:
        positions_T = step_positions()
        if positions_T is None:
            embedded: torch.Tensor = self._own_forward(*args, **more)
        else:
            embedded = self._own_forward(args[0], position_ids=positions_T)
        return embedded
