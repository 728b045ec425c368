"""Weights from safetensors, one tensor at a time, straight into the merged parameters; or dummies for benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from tandem.engine.config import ModelOptions
from tandem.engine.dummy_weights import fill_with_noise
from tandem.engine.errors import CheckpointError
from tandem.engine.model.decoder import DecoderModel
from tandem.engine.model_config import ModelConfig
from tandem.engine.weights import StoredTensor, check_weights


def load_model(
    folder: Path,
    config: ModelConfig,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: str = "auto",
) -> DecoderModel:
    """The model in `dtype` on `device`. Raises CheckpointError for missing, unknown, misshapen or torn tensors.

    Files are checked by their headers before the first byte is copied, so a wrong folder fails at once.
    """
    if options.load_format == "dummy":
        model = DecoderModel(config, dtype, device, attention_backend)
        fill_with_noise(model)
        model.finish_loading()
        return model.eval()
    needed = {name: tuple(part.shape) for name, part in _targets(DecoderModel(config, dtype, "meta"), config).items()}
    stored = check_weights(folder, needed, config.tie_word_embeddings)
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        _check_tied(stored)
    model = DecoderModel(config, dtype, device, attention_backend)
    targets = _targets(model, config)
    progress = tqdm(total=len(targets), desc="loading weights", unit="tensor", disable=not sys.stderr.isatty())
    with progress:
        for name, tensor in _tensors({name: stored[name] for name in targets}):
            targets[name].copy_(tensor)
            progress.update()
    model.finish_loading()
    return model.eval()


def _tensors(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in turn, file by file: mapped from the file, not read as a whole."""
    for path in sorted({tensor.path for tensor in stored.values()}):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name, tensor in stored.items():
                    if tensor.path == path:
                        yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error


def _check_tied(stored: Mapping[str, StoredTensor]) -> None:
    """A checkpoint that says it is tied may still hold an output matrix, but only a copy of the embedding."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    embedding, head = dict(_tensors({name: stored[name] for name in names})).values()
    if embedding.dtype != head.dtype or not torch.equal(embedding, head):
        raise CheckpointError(
            f"{stored[names[1]].path}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
            "that they are tied; set tie_word_embeddings to false there"
        )


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
