"""The quantised layers of a decoder, filled from a checkpoint or with made-up weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.weights.quantisation import MXFP4, Quantisation
from tandem.engine.models import dummy_weights, packed_experts
from tandem.engine.models.layers.basic import Linear
from tandem.engine.models.mixture_layer import StackedExperts, expert_layers
from tandem.engine.models.stored_layers import HasLayers, made_of, needed_tensors, weight_of
from tandem.engine.models.weights import TORCH_NAMES, Needed, StoredTensor
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.experts.stacked import StackedWeight
from tandem.kernels.products.quantised_weight import QuantisedWeight

DTYPES: dict[str, torch.dtype] = {stored: getattr(torch, name) for stored, name in TORCH_NAMES.items()}


def part_rows(name: str, num_rows: int, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name in the checkpoint -> the rows of the parameter or module `name` that it fills: all, or a run of what is
    merged into it."""
    full = name if name.startswith("lm_head") else f"model.{name}"
    for merged, part in (("q_a_kv_a_proj", "q_a_proj"), ("q_kv_a_proj", "q_proj")):
        if merged in full:
            assert config.latents is not None, name
            first = num_rows - config.latents.size - config.latents.rotated
            own = {part: (0, first), "kv_a_proj_with_mqa": (first, num_rows)}
            return {full.replace(merged, each): run for each, run in own.items()}
    if "qkv_proj" in full:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        runs = zip(("q", "k", "v"), ((0, q), (q, q + kv), (q + kv, q + 2 * kv)), strict=True)
        return {full.replace("qkv_proj", f"{part}_proj"): run for part, run in runs}
    if "gate_up_proj" in full:
        half = num_rows // 2
        runs = zip(("gate", "up"), ((0, half), (half, num_rows)), strict=True)
        return {full.replace("gate_up_proj", f"{part}_proj"): run for part, run in runs}
    return {full: (0, num_rows)}


def layers_of(model: HasLayers) -> dict[str, QuantisedWeight]:
    """Name of a quantised layer in the checkpoint -> what of this rank's weights it fills, a view."""
    config = model.shard.config(model.config)
    found = {}
    for name, weight in _quantised(model):
        if isinstance(weight, StackedWeight):
            for part, run in _expert_layers(name, weight, config).items():
                found[part] = weight.rows(*run)
        else:
            for part, (start, stop) in part_rows(name, weight.shape[0], config).items():
                found[part] = weight.rows(start, stop)
    return found


def num_layers(model: HasLayers) -> int:
    """How many times `fill` tells that it has filled something."""
    return len(layers_of(model)) + len(list(packed_experts.matrices_of(model)))


def needed_of(whole: HasLayers) -> dict[str, Needed]:
    """Name -> what a checkpoint must hold for the quantised layers of a model that is not shared out."""
    how = whole.config.quantisation
    if how is None:
        return {}
    if how.stored == MXFP4:
        return packed_experts.needed_of(whole)
    return {
        f"{layer}.{own}": needed
        for layer, weight in layers_of(whole).items()
        for own, needed in needed_tensors(how, *weight.shape).items()
    }


def scale_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The type in which scales of 4 bits are kept: the checkpoint's, so that none is rounded."""
    found = {one.dtype for name, one in stored.items() if name.endswith((".scales", ".weight_scale"))}
    return DTYPES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


def fill(
    model: HasLayers, stored: Mapping[str, StoredTensor], device: torch.device, on_filled: Callable[[], None]
) -> None:
    """Fills this rank's quantised layers. Each is read whole and made on the device, then cut, so that all ranks have
    the numbers that a single one has. Raises CheckpointError."""
    how = model.config.quantisation
    if how is None:
        return
    if how.stored == MXFP4:
        packed_experts.fill(model, stored, device, on_filled)
        return
    config, shard = model.config, model.shard
    with ExitStack() as stack:
        files = opened(stored, stack)
        for layer, own in layers_of(model).items():
            tensors = tensors_of(how, layer, stored, files, device)
            own.copy_(_cut(weight_of(how, layer, tensors, own.scales.dtype), layer, config, shard))
            on_filled()


def opened(stored: Mapping[str, StoredTensor], stack: ExitStack) -> dict[Path, safe_open]:
    """The files that hold the tensors, until the stack ends. Raises CheckpointError."""
    return {path: stack.enter_context(_opened(str(path))) for path in sorted({one.path for one in stored.values()})}


def tensors_of(
    how: Quantisation,
    layer: str,
    stored: Mapping[str, StoredTensor],
    files: Mapping[Path, safe_open],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """What is stored of a quantised layer, by names below its own. Raises CheckpointError."""
    names = [f"{layer}.{each}" for each in needed_tensors(how, 1, 1) if f"{layer}.{each}" in stored]
    try:
        return {name.rpartition(".")[2]: files[stored[name].path].get_tensor(name).to(device) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"can't read {layer}: {error}; the file is torn, fetch it again") from error


def fill_with_noise(model: HasLayers, whole: HasLayers, dtype: torch.dtype, device: torch.device) -> None:
    """Fills this rank's quantised layers with those made of what a model of 16 bits would be filled with."""
    how, config = model.config.quantisation, model.config
    if how is None:
        return
    if how.stored == MXFP4:
        packed_experts.fill_with_noise(model, whole, dtype, device)
        return
    shard, layers = model.shard, layers_of(model)
    for name, weight in _quantised(whole):
        noise = torch.empty(weight.shape, dtype=dtype, device=device)
        if isinstance(weight, StackedWeight):
            dummy_weights.fill_with_noise(name, noise)
            runs = _expert_layers(name, weight, config).items()
            parts = {part: noise[place, start:stop] for part, (place, start, stop) in runs}
        else:
            dummy_weights.fill_with_noise(f"{name}.weight", noise)
            parts = {part: noise[slice(*run)] for part, run in part_rows(name, len(noise), config).items()}
        for layer, plain in parts.items():
            if layer not in layers:
                continue  # an expert of another rank
            own = layers[layer]
            own.copy_(_cut(made_of(how, plain, own.scales.dtype), layer, config, shard))


def _expert_layers(name: str, weight: StackedWeight, config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    assert config.mixture is not None, f"{name} of a model without experts"
    return expert_layers(name, weight.shape[1], config.mixture.own, config.architecture)


def _quantised(model: HasLayers) -> Iterator[tuple[str, QuantisedWeight | StackedWeight]]:
    """Linear layers by their names, matrices of experts by those of the parameters that they stand for."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.quantised is not None:
            yield name, module.quantised
        elif isinstance(module, StackedExperts):
            for own, weight in module.quantised().items():
                yield f"{name}.{own}", weight


def _cut(weight: QuantisedWeight, layer: str, config: ModelConfig, shard: Shard) -> QuantisedWeight:
    cut = shard.cut(f"{layer}.weight", config)
    if cut is None:
        return weight
    try:
        return weight.rows(cut.start, cut.stop) if cut.dim == 0 else weight.columns(cut.start, cut.stop)
    except ValueError as error:
        raise ConfigError(f"--tensor-parallel-size {shard.size}: {layer}: {error}; take a smaller one") from None


def _opened(path: str) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error
