"""Adapters of low rank beside the modules of a decoder of transformers.

Every product of the decoder takes them, as PEFT counts products: an nn.Linear, or GPT-2's Conv1D, under its own name.
Which really compute something of each token, once a pass, shows in a pass of an empty model on the meta device; what
doesn't (experts, whose matrices are no modules) is no site, and an adapter that names it is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.engine.models.adapter_sites import Site, SitePart
from tandem.engine.models.hf.layers import decoder_of, run_empty
from tandem.engine.parallel.sharding import Cut
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.products.adapter_rows import AdapterStack
from tandem.kernels.products.adapters import expand, shrink

NUM_TOKENS = 2  # of the empty model's pass


class AdaptedProduct:
    """The forward function of a product to which the adapters of the step's rows are added, before what hooks do with
    its output."""

    def __init__(self, module: Any, stack: AdapterStack) -> None:
        self._own_forward, self._stack = module.forward, stack

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = get_forward_context().adapters
        if rows is None:
            plain: torch.Tensor = self._own_forward(x)
            return plain
        low = shrink(x.reshape(-1, x.shape[-1]).contiguous(), self._stack, rows)
        out: torch.Tensor = self._own_forward(x)
        expand(out.view(-1, out.shape[-1]), low, self._stack, rows)
        return out


def add_adapters(module: Any, stack: AdapterStack) -> None:
    module.forward = AdaptedProduct(module, stack)


def sites_of(empty: PreTrainedModel, decoder: PreTrainedModel) -> tuple[Site, ...]:
    """The sites of `decoder`, this rank's part of the one that `empty` has on the meta device; names are within it."""
    prefix, whole = decoder_of(empty)
    num_rows: dict[str, list[int]] = {}
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_hook(partial(_note_rows, num_rows.setdefault(name, [])))
    run_empty(empty)
    return tuple(
        Site(name, (_part(f"{prefix}.{name}", whole.get_submodule(name), decoder.get_submodule(name)),))
        for name, seen in num_rows.items()
        if seen == [NUM_TOKENS]
    )


def _note_rows(seen: list[int], module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    seen.append(output.numel() // output.shape[-1])


def _part(name: str, whole: Any, own: Any) -> SitePart:
    if isinstance(whole, Conv1D):
        return SitePart(name, whole.nf, whole.nx)
    cut: Cut | None = getattr(own, "tandem_cut", None)
    return SitePart(name, whole.out_features, whole.in_features, cut)
