"""What a quantised linear layer is stored as, and how that becomes a weight as the kernels read it.

N outputs, K inputs, G groups. Orders of nibbles are those that the formats' own packers write: GPTQ (AutoGPTQ) and
compressed-tensors one after another, AWQ (AutoAWQ's gemm) in turns, of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.weights.quantisation import MADE, Quantisation
from tandem.engine.models.weights import PLAIN_DTYPES, Needed
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.products.quantised_weight import (
    INT4_HALF,
    LANE_INPUTS,
    QuantisedWeight,
    empty_fp8,
    empty_int4,
    packed,
    quantise_fp8,
    quantise_int4,
)

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word holds output i of its eight


class HasLayers(Protocol):
    """A model, or a head beside one, whose modules are called `layers.<number>.…`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shard(self) -> Shard: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


def needed_tensors(how: Quantisation, num_outputs: int, num_inputs: int) -> dict[str, Needed]:
    """Name below the layer's -> what it must be. Where two names mean the same, both are optional."""
    groups = -(-num_inputs // how.group) if how.group else 1
    weight = (num_outputs, num_inputs)
    if how.stored == MADE:
        return {"weight": Needed((weight,), PLAIN_DTYPES)}
    if how.stored == "fp8":
        if how.group:
            shapes: tuple[tuple[int, ...], ...] = ((-(-num_outputs // how.block), groups),)
        else:
            shapes = ((num_outputs, 1), (num_outputs,)) if how.block else ((), (1,), (1, 1))
        scale = Needed(shapes, (*PLAIN_DTYPES, "F8_E8M0"), is_optional=True)
        return {"weight": Needed((weight,), ("F8_E4M3",)), "weight_scale": scale, "weight_scale_inv": scale}
    if how.stored == "packed":
        zeros = {"weight_zero_point": Needed(((num_outputs // 8, groups),), ("I32",))} if how.has_zeros else {}
        words = Needed(((num_outputs, num_inputs // 8),), ("I32",))
        return {"weight_packed": words, "weight_scale": Needed(((num_outputs, groups),), PLAIN_DTYPES), **zeros}
    along = (num_inputs // 8, num_outputs) if how.stored == "gptq" else (num_inputs, num_outputs // 8)
    order = {"g_idx": Needed(((num_inputs,),), ("I32",), is_optional=True)} if how.stored == "gptq" else {}
    return {
        "qweight": Needed((along,), ("I32",)),
        "qzeros": Needed(((groups, num_outputs // 8),), ("I32",)),
        "scales": Needed(((groups, num_outputs),), PLAIN_DTYPES),
        **order,
    }


def empty_weight(
    how: Quantisation, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device | str
) -> QuantisedWeight:
    """Room for a layer. Raises ValueError for sizes that the layout has no place for."""
    if how.bits == 8:
        return empty_fp8(num_outputs, num_inputs, how.group, device)
    if num_inputs % max(how.group, LANE_INPUTS):
        raise ValueError(f"{num_inputs} inputs are no whole groups of {max(how.group, LANE_INPUTS)}")
    return empty_int4(num_outputs, num_inputs, how.group, dtype, device)


def made_of(how: Quantisation, weight_NK: torch.Tensor, scale_dtype: torch.dtype) -> QuantisedWeight:
    """A plain weight quantised as `how` says: for made-up weights, and where a plain checkpoint is made smaller."""
    if how.bits == 4:
        return quantise_int4(weight_NK, how.group, scale_dtype)
    made = quantise_fp8(weight_NK)
    if not how.group:
        return made
    groups = -(-weight_NK.shape[1] // how.group)
    return QuantisedWeight(made.values, made.scales.repeat(groups, 1), None, how.group)


def weight_of(
    how: Quantisation, layer: str, stored: Mapping[str, torch.Tensor], scale_dtype: torch.dtype
) -> QuantisedWeight:
    """The layer's whole weight, of tensors on its device by names below the layer's. Raises CheckpointError."""
    if how.stored == MADE:
        return quantise_fp8(stored["weight"])
    if how.stored == "fp8":
        return _fp8(how, layer, stored)
    if how.stored == "packed":
        words = _along_last(stored["weight_packed"])
        zeros = None
        if how.has_zeros:
            zeros = _along_last(stored["weight_zero_point"].t().contiguous())
        return _int4(how, words, stored["weight_scale"].t(), zeros, scale_dtype)
    scales = stored["scales"]
    if how.stored == "awq":
        return _int4(how, _awq(stored["qweight"]).t(), scales, _awq(stored["qzeros"]), scale_dtype)
    order = stored.get("g_idx")
    if order is not None and how.group:
        expected = torch.arange(len(order), device=order.device) // how.group
        if not torch.equal(order.long(), expected):
            raise CheckpointError(
                f"{layer}.g_idx puts inputs into groups out of order, which is not supported; use a checkpoint made "
                "with desc_act false"
            )
    zeros = (_along_last(stored["qzeros"]) + how.zero_offset) & 15
    return _int4(how, _along_last(stored["qweight"].t().contiguous()), scales, zeros, scale_dtype)


def _fp8(how: Quantisation, layer: str, stored: Mapping[str, torch.Tensor]) -> QuantisedWeight:
    scale = stored.get("weight_scale", stored.get("weight_scale_inv"))
    if scale is None:
        raise CheckpointError(f"no shard holds {layer}.weight_scale or weight_scale_inv; fetch the model again")
    values, scale = stored["weight"], scale.float()
    if how.group:
        scales = scale.repeat_interleave(how.block, 0)[: values.shape[0]].t()
    else:
        scales = scale.reshape(1, -1).expand(1, values.shape[0])
    return QuantisedWeight(values, scales.contiguous(), None, how.group)


def _int4(
    how: Quantisation,
    stored_NK: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantisedWeight:
    scales = scales_GN.to(dtype).contiguous()
    zeros = torch.full_like(scales, INT4_HALF) if zeros_GN is None else zeros_GN.to(dtype).contiguous()
    return QuantisedWeight(packed(stored_NK.to(torch.uint8).contiguous()), scales, zeros, how.group)


def _along_last(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, B / 8] -> uint8 [A, B]: the lowest nibble of a word comes first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)


def _awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, N / 8] -> uint8 [A, N], of AWQ's order."""
    order = torch.tensor(AWQ_ORDER, device=words.device)
    return _along_last(words).view(len(words), -1, 8)[:, :, order].flatten(1)
