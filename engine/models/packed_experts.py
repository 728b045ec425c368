"""GPT-OSS's experts as its checkpoints store them, in MXFP4 (e2m1 in groups of 32 inputs that share a power of two).

X experts, N outputs, K inputs, G = K / 32 groups. Gate's and up's outputs take turns in what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.models import dummy_weights
from tandem.engine.models.mixture_layer import StackedExperts
from tandem.engine.models.stored_layers import HasLayers
from tandem.engine.models.weights import PLAIN_DTYPES, Needed, StoredTensor
from tandem.kernels.experts.stacked import MX_GROUP, StackedWeight

GATED = "gate_up_proj"
PARTS = ("blocks", "scales", "bias")
DUMMY_EXPONENT = 120  # 2^-7: with any e2m1 it keeps activations' size at some 3,000 inputs


class PackedMatrix(NamedTuple):
    """Matrices of one kind of all experts of a layer: `name` in the checkpoint, and what a process holds of them, of
    experts, of outputs as they are stored and of inputs. `adds_bias`: another rank adds it else."""

    name: str
    stack: StackedWeight
    experts: slice
    outputs: slice
    inputs: slice
    adds_bias: bool

    def fill(self, place: int, codes_NK: torch.Tensor, exponents_NG: torch.Tensor, bias_N: torch.Tensor) -> None:
        """An expert here becomes what is stored of it, in uint8 codes and exponents. Raises CheckpointError."""
        order = torch.arange(len(codes_NK), device=codes_NK.device)
        if self.name.endswith(GATED):
            order = order.view(-1, 2).t().flatten()
        bias_N = bias_N[order] if self.adds_bias else torch.zeros_like(bias_N)
        try:
            self.stack.fill_e2m1(place, codes_NK[order], exponents_NG[order], bias_N)
        except ValueError as error:
            raise CheckpointError(f"{self.name}_scales: {error}; use a checkpoint in bf16") from error


def matrices_of(model: HasLayers) -> Iterator[PackedMatrix]:
    """The matrices in MXFP4 of a process's share of a model."""
    config, shard = model.config, model.shard
    if config.mixture is None:
        return
    own = shard.config(config).mixture
    assert own is not None, "it has experts"
    experts = slice(own.own.start, own.own.stop)
    for name, module in model.named_modules():
        if not isinstance(module, StackedExperts):
            continue
        cut = shard.cut(f"model.{name}.down_proj.weight", config)
        run = slice(0, config.mixture.width) if cut is None else slice(cut.start, cut.stop)
        every, both = slice(None), slice(2 * run.start, 2 * run.stop)
        adds_bias = cut is None or shard.rank == 0
        for kind, stack, outputs, inputs, adds in (
            (GATED, module.gate_up_proj, both, every, True),
            ("down_proj", module.down_proj, every, run, adds_bias),
        ):
            if isinstance(stack, StackedWeight) and stack.is_e2m1:
                yield PackedMatrix(f"model.{name}.{kind}", stack, experts, outputs, inputs, adds)


def needed_of(whole: HasLayers) -> dict[str, Needed]:
    """Name -> what a checkpoint must hold for the experts of a model that is not shared out."""
    needed = {}
    for name, stack, *_ in matrices_of(whole):
        num_experts, num_outputs, num_inputs = stack.shape
        groups = num_inputs // MX_GROUP
        needed[f"{name}_blocks"] = Needed(((num_experts, num_outputs, groups, MX_GROUP // 2),), ("U8",))
        needed[f"{name}_scales"] = Needed(((num_experts, num_outputs, groups),), ("U8",))
        needed[f"{name}_bias"] = Needed(((num_experts, num_outputs),), PLAIN_DTYPES)
    return needed


def fill(
    model: HasLayers, stored: Mapping[str, StoredTensor], device: torch.device, on_filled: Callable[[], None]
) -> None:
    """Fills this process's share, of which alone the bytes are read. Raises CheckpointError."""
    for matrix in matrices_of(model):
        start, stop = matrix.inputs.start or 0, matrix.inputs.stop
        groups = slice(start // MX_GROUP, None if stop is None else stop // MX_GROUP)
        cuts = ((matrix.experts, matrix.outputs, groups),) * 2 + ((matrix.experts, matrix.outputs),)
        blocks, exponents, bias = (
            _read(stored[f"{matrix.name}_{part}"].path, f"{matrix.name}_{part}", cut).to(device)
            for part, cut in zip(PARTS, cuts, strict=True)
        )
        for place, bytes_NGB in enumerate(blocks):  # the lower half of a byte comes first
            codes_NK = torch.stack((bytes_NGB & 15, bytes_NGB >> 4), -1).flatten(1)
            matrix.fill(place, codes_NK, exponents[place], bias[place])
        on_filled()


def fill_with_noise(model: HasLayers, whole: HasLayers, dtype: torch.dtype, device: torch.device) -> None:
    """Fills this process's share with what a model of 16 bits would be filled with, rounded to 4 bits."""
    for matrix, of_all in zip(matrices_of(model), matrices_of(whole), strict=True):
        noise_XNK = torch.empty(of_all.stack.shape, dtype=dtype, device=device)
        dummy_weights.fill_with_noise(matrix.name, noise_XNK)
        factor = 8 / noise_XNK.abs().amax()
        for place, noise_NK in enumerate(noise_XNK[matrix.experts, matrix.outputs, matrix.inputs]):
            codes_NK = (noise_NK * factor + 8).clamp_(0, 15).to(torch.uint8)
            exponents_NG = torch.full_like(codes_NK[:, ::MX_GROUP], DUMMY_EXPONENT)
            matrix.fill(place, codes_NK, exponents_NG, torch.zeros_like(noise_NK[:, 0]))


def _read(path: Path, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
    """Part of a stored tensor. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_slice(name)[cut]
            return tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error
