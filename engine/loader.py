"""Weights from safetensors, one tensor at a time, straight into the merged parameters; or dummies for benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from tandem.engine.config import ModelOptions
from tandem.engine.errors import CheckpointError
from tandem.engine.loader_files import shard_paths
from tandem.engine.model.decoder import DecoderModel
from tandem.engine.model_config import ModelConfig


def load_model(
    folder: Path,
    config: ModelConfig,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: str = "auto",
) -> DecoderModel:
    """The model in `dtype` on `device`. Raises CheckpointError for missing, unknown, misshapen or torn tensors."""
    files = [] if options.load_format == "dummy" else shard_paths(folder)
    model = DecoderModel(config, dtype, device, attention_backend)
    if options.load_format == "dummy":
        _fill_with_noise(model)
    else:
        _fill(model, config, files)
    return model.eval()


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor, Path]]:
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    yield name, shard.get_tensor(name), path
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error


def _fill(model: DecoderModel, config: ModelConfig, files: list[Path]) -> None:
    targets = _targets(model, config)
    seen: set[str] = set()
    progress = tqdm(total=len(targets), desc="loading weights", unit="tensor", disable=not sys.stderr.isatty())
    for name, tensor, path in _tensors(files):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        target = targets.get(name)
        if target is None:
            raise CheckpointError(f"{path} holds {name}, which a {config.architecture} model of this config has not")
        if target.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, config.json asks for {list(target.shape)}"
            raise CheckpointError(f"{path}: {name} has shape {shapes}; config and weights don't belong together")
        target.copy_(tensor)
        seen.add(name)
        progress.update()
    progress.close()
    missing = sorted(targets.keys() - seen)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{files[0].parent}: no shard holds {missing[0]}{more}; fetch the model again")


def _targets(model: DecoderModel, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the part of a parameter that it fills."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    targets: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if "qkv_proj" in full:
            for part, piece in zip(("q", "k", "v"), parameter.data.split((q, kv, kv)), strict=True):
                targets[full.replace("qkv_proj", f"{part}_proj")] = piece
        elif "gate_up_proj" in full:
            for part, piece in zip(("gate", "up"), parameter.data.chunk(2), strict=True):
                targets[full.replace("gate_up_proj", f"{part}_proj")] = piece
        else:
            targets[full] = parameter.data
    return targets


def _fill_with_noise(model: DecoderModel) -> None:
    """Same numbers on every start; sizes such that activations neither vanish nor overflow."""
    generator = torch.Generator(device=model.embed_tokens.weight.device).manual_seed(20)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.data.zero_()
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
