"""Hidden states of a decoder of transformers, taken by hooks on its layers, for a head that guesses from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.models.heads.taps import FeatureTaps


def tap_layers(decoder: nn.Module, num_layers: int, taps: FeatureTaps) -> None:
    """Has each pass leave what enters the layers that `taps` names; what leaves the last norm is the model's to leave.
    Raises ConfigError where layers aren't at hand."""
    entered = [layer for layer in taps.layers if layer < num_layers]
    if not entered:
        return
    lists = [one for one in decoder.children() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    if len(lists) != 1:
        raise ConfigError(
            f"--speculative-config: eagle3 reads what enters layers, and {type(decoder).__name__} of transformers has "
            f"no one list of its {num_layers}: choose another method"
        )
    for index in entered:
        lists[0][index].register_forward_pre_hook(partial(_take, taps, index), with_kwargs=True)


def _take(
    taps: FeatureTaps, index: int, layer: nn.Module, args: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]
) -> None:
    hidden_1TE = args[0] if args else named["hidden_states"]
    assert hidden_1TE.dim() == 3, f"what enters {type(layer).__name__} is {list(hidden_1TE.shape)}"
    taps.take(index, None, hidden_1TE[0])
