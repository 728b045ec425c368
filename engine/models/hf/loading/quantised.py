"""Quantised linear layers in a decoder of transformers, in place of its own (docs/quantised_weights.md).

transformers loads the checkpoint as if it weren't quantised: what a quantised layer has under the name of its weight is
passed over, and so are the tensors that it doesn't know. Then each such layer is read and made as those of our own
modules are. N outputs, K inputs.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.weights.quantisation import MADE, Quantisation
from tandem.engine.models.hf.layers import decoder_of
from tandem.engine.models.quantised_layers import opened, scale_dtype, tensors_of
from tandem.engine.models.stored_layers import made_of, needed_tensors, weight_of
from tandem.engine.models.weights import StoredTensor, stored_tensors
from tandem.kernels.products.matmul import linear
from tandem.kernels.products.quantised_weight import QuantisedWeight

MARKS = ("qweight", "weight_packed")  # what a layer of 4 bits has in place of a weight
IN_A_LAYER = re.compile(r"(^|\.)\d+\.")  # of a list of layers, as every decoder has it


class QuantisedLinear(nn.Module):
    """A linear layer of a quantised weight, which is on its device from the beginning. Rows [..., K] -> [..., N]."""

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantised, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = linear(x.reshape(-1, x.shape[-1]), self.quantised, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


class QuantisedLayers:
    """The quantised layers of a checkpoint, by their names in it. Empty where there is none."""

    def __init__(self, folder: Path, how: Quantisation | None, load_format: str) -> None:
        self._folder, self._how = folder, how
        self._stored: dict[str, StoredTensor] = {}
        self._module_of: dict[str, str] = {}  # name in the checkpoint -> within the model
        if how is not None and load_format != "dummy" and how.stored != MADE:
            self._stored = stored_tensors(folder)

    def find(self, causal: PreTrainedModel) -> None:
        """Finds the layers in the model. Raises CheckpointError for one that is no linear layer of its decoder, and
        ConfigError for mixtures of experts and for inputs that are no whole groups."""
        if self._how is None:
            return
        prefix, decoder = decoder_of(causal)
        own = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
        if any(name.rpartition(".")[2] == "experts" for name, _ in decoder.named_modules()):
            raise ConfigError(
                f"{causal.config.model_type}: quantised mixtures of experts that run by transformers' modules are not "
                "supported; use the bf16 checkpoint"
            )
        if self._stored:
            self._module_of = {layer: f"{prefix}.{self._place_of(layer, own)}" for layer in sorted(self._names())}
        else:
            names = (name for name in own if IN_A_LAYER.search(name) and not self._how.leaves_out(f"model.{name}"))
            self._module_of = {f"model.{name}": f"{prefix}.{name}" for name in names}
        if not self._module_of and self._stored:
            raise CheckpointError(f"{self._folder}: config.json says that weights are quantised, and none is")
        if not self._module_of:
            raise ConfigError(f"{causal.config.model_type}: none of its layers can be quantised; use it as it is")
        if len(set(self._module_of.values())) < len(self._module_of):
            raise CheckpointError(f"{self._folder}: layers outside of the decoder are quantised, which isn't supported")
        for layer, name in self._module_of.items():
            num_inputs = int(causal.get_submodule(name).in_features)  # type: ignore[arg-type]
            least = self._how.least_inputs
            if self._how.bits == 4 and num_inputs % least:
                raise ConfigError(f"{layer} can't be quantised so: {num_inputs} inputs are no whole groups of {least}")

    def explains(self, name: str) -> bool:
        """Whether a tensor that transformers missed, or didn't know, belongs to a quantised layer."""
        layer = name.rpartition(".")[0]
        return layer in self._module_of or layer in self._module_of.values()

    def put_in(self, causal: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        """Puts the layers, made on the device, into the model. Raises CheckpointError."""
        if self._how is None:
            return
        kept = scale_dtype(self._stored) if self._stored else dtype
        with ExitStack() as stack:
            files = opened(self._stored, stack)
            for layer, name in self._module_of.items():
                module: Any = causal.get_submodule(name)
                if self._stored:
                    self._check(layer, (module.out_features, module.in_features))
                    tensors = tensors_of(self._how, layer, self._stored, files, device)
                    weight = weight_of(self._how, layer, tensors, kept)
                else:
                    weight = made_of(self._how, module.weight.data.to(device), kept)
                folder, _, own = name.rpartition(".")
                setattr(causal.get_submodule(folder), own, QuantisedLinear(weight, module.bias))

    def _names(self) -> set[str]:
        return {
            layer
            for name, one in self._stored.items()
            for layer, _, own in [name.rpartition(".")]
            if own in MARKS or (own == "weight" and one.dtype == "F8_E4M3")
        }

    def _place_of(self, layer: str, own: dict[str, nn.Linear]) -> str:
        """The longest name within the decoder that the layer's ends in."""
        found = [name for name in own if f".{layer}".endswith(f".{name}")]
        if not found:
            raise CheckpointError(
                f"{self._folder}: {layer} is quantised, and no linear layer of the decoder; that is not supported"
            )
        return max(found, key=len)

    def _check(self, layer: str, shape: tuple[int, int]) -> None:
        assert self._how is not None
        for own, needed in needed_tensors(self._how, *shape).items():
            one = self._stored.get(f"{layer}.{own}")
            if one is None and not needed.is_optional:
                raise CheckpointError(f"{self._folder}: no shard holds {layer}.{own}; fetch the model again")
            if one is not None and (one.shape not in needed.shapes or one.dtype not in needed.dtypes):
                raise CheckpointError(
                    f"{one.path}: {layer}.{own} is {one.dtype} {list(one.shape)}, which quantization_config in "
                    "config.json doesn't say; config and weights don't belong together"
                )
