"""Weights from safetensors, one tensor at a time, straight into the merged parameters; or dummies for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.models import quantised_layers
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.heads.mtp_config import mtp_prefix
from tandem.engine.models.load_meter import LoadMeter
from tandem.engine.models.mixture_layer import mixture_parts
from tandem.engine.models.quantised_layers import part_rows
from tandem.engine.models.weights import StoredTensor, check_weights
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Cut


def load_model(
    folder: Path,
    config: ModelConfig,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: str = "auto",
    group: TensorParallel | None = None,
    on_loaded: Callable[[float], None] | None = None,
    expert_group: ExpertGroup | None = None,
) -> DecoderModel:
    """The model in `dtype` on `device`; with a group of either kind this process's share, of which alone it reads the
    bytes.

    Files are checked by their headers before the first byte is copied, so a wrong folder fails at once. `on_loaded` is
    told the fraction of the tensors that is there, from 0 to 1. Raises CheckpointError for missing, unknown, misshapen
    or torn tensors, and ConfigError for a model that can't be shared out.
    """
    whole = DecoderModel(config, dtype, "meta", attention_backend)
    if options.load_format == "dummy":
        model = DecoderModel(config, dtype, device, attention_backend, group, expert_group=expert_group)
        _fill_with_noise(model, whole)
        quantised_layers.fill_with_noise(model, whole, dtype, device)
        model.finish_loading()
        return model.eval()
    needed = {name: tuple(part.shape) for name, part in targets_of(whole, config).items()}
    heads = mtp_prefix(config)  # read where they are asked for: engine/models/heads/mtp_loader.py
    stored = check_weights(
        folder,
        needed,
        config.tie_word_embeddings,
        quantised_layers.needed_of(whole),
        lambda name: heads is None or not name.startswith(heads),
    )
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(stored)
    scale_dtype = quantised_layers.scale_dtype(stored)
    model = DecoderModel(config, dtype, device, attention_backend, group, scale_dtype, expert_group)
    targets, shard = _own_targets(model), model.shard
    cuts = {name: shard.cut(name, config) for name in targets}
    with LoadMeter(len(targets) + quantised_layers.num_layers(model), on_loaded) as progress:
        for name, tensor in read_tensors({name: stored[name] for name in targets}, cuts):
            shard.fill(name, targets[name], tensor)
            progress.update()
        quantised_layers.fill(model, stored, device, progress.update)
    model.finish_loading()
    return model.eval()


def _fill_with_noise(model: DecoderModel, whole: DecoderModel) -> None:
    """Fills `model` with its share of the made-up weights of the `whole` one."""
    config, shard = model.config, model.shard
    if shard.is_whole:
        for name, parameter in model.named_parameters():
            fill_with_noise(name, parameter.data)
        return
    targets = _own_targets(model)
    for name, parameter in whole.named_parameters():
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=model.embed_tokens.weight.device)
        fill_with_noise(name, noise)
        for part, tensor in _parts(name, noise, config).items():
            if part not in targets:
                continue  # an expert of another process
            cut = shard.cut(part, config)
            targets[part].copy_(tensor if cut is None else cut.of(tensor))


def read_tensors(
    stored: Mapping[str, StoredTensor], cuts: Mapping[str, Cut | None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor, or what `cuts` takes of it), file by file. Tensors are mapped from the file, not read."""
    cuts = cuts or {}
    for path in sorted({tensor.path for tensor in stored.values()}):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name, tensor in stored.items():
                    if tensor.path == path:
                        cut = cuts.get(name)
                        if cut is None:
                            yield name, shard.get_tensor(name)
                        else:
                            index = (slice(None),) * cut.dim + (slice(cut.start, cut.stop),)
                            yield name, shard.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error


def _check_tied(stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError when a tied checkpoint holds an output matrix that is no copy of the embedding."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    embedding, head = dict(read_tensors({name: stored[name] for name in names})).values()
    if embedding.dtype != head.dtype or not torch.equal(embedding, head):
        raise CheckpointError(
            f"{stored[names[1]].path}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
            "that they are tied; set tie_word_embeddings to false there"
        )


def targets_of(model: nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the part of a parameter that it fills. `config`: what the model's layers are made for."""
    targets: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        targets |= _parts(name, parameter.data, config)
    return targets


def _own_targets(model: DecoderModel) -> dict[str, torch.Tensor]:
    return targets_of(model, model.shard.config(model.config))


def _parts(name: str, parameter: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the part of `parameter` that it fills: all of it, or one of what is merged into it."""
    mixture = config.mixture
    if mixture is not None and (parts := mixture_parts(name, parameter, config.architecture, mixture.own)):
        return parts
    runs = part_rows(name, len(parameter), config)
    return {part: parameter[start:stop] for part, (start, stop) in runs.items()}
