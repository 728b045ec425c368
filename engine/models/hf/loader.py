"""A decoder of transformers with its weights, tried against its own attention before it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.hf.adapters import adapt
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.config import HFConfig, read_config
from tandem.engine.models.hf.layers import class_of
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.hf.norms import fuse_norms
from tandem.engine.models.hf.parallel import share_experts_out, share_out
from tandem.engine.models.hf.rotations import fuse_rotations
from tandem.engine.models.hf.towers import text_attention
from tandem.engine.models.hf.trials.trial import check_against_own_attention
from tandem.engine.models.weights import stored_tensors
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel


def load_hf_model(
    folder: Path,
    config: HFConfig,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: str = "auto",
    group: TensorParallel | None = None,
    on_loaded: Callable[[float], None] | None = None,
    expert_group: ExpertGroup | None = None,
) -> HFModel:
    """The model in `dtype` on `device`; with a group of either kind this process's part of it. `on_loaded` is told the
    fraction of the weights that is there, from 0 to 1.

    Raises CheckpointError for missing, unknown or misshapen tensors, and for a model of which our attention and its
    own make different hidden states.
    """
    if options.load_format == "dummy":
        is_whole = group is None and expert_group is None
        causal = _made_up(folder, device if is_whole else torch.device("cpu"), dtype)
    else:
        stored_tensors(folder)  # a torn shard is named at once
        causal = _loaded(folder, dtype)
    adapt(causal)
    if group is not None:
        share_out(causal, config.layers, group.shard, group)
    if expert_group is not None:
        share_experts_out(causal, expert_group)
    causal.to(device)  # type: ignore[arg-type]  # in place; its annotation is a decorator's
    if device.type == "cuda":
        with torch.inference_mode():
            fuse_norms(causal, device, dtype)
        fuse_rotations(causal)
    model = HFModel(causal.eval(), config, attention_backend, group, expert_group)
    check_against_own_attention(model, device, dtype)
    if on_loaded is not None:
        on_loaded(1.0)
    return model


def _loaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    causal: PreTrainedModel
    found: dict[str, Any]
    config = read_config(folder)
    try:
        causal, found = class_of(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=text_attention(config, NAME),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder}: transformers can't load it: {said}; fetch the model again") from error
    for what, why in (
        ("missing_keys", "no shard holds {}; fetch the model again"),
        ("unexpected_keys", "the weights hold {}, which a model of this config.json does not have"),
        ("mismatched_keys", "{} has another shape than config.json asks for; they don't belong together"),
    ):
        if found[what]:
            raise CheckpointError(f"{folder}: {why.format(sorted(map(str, found[what]))[0])}")
    return causal


def _made_up(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the made-up weights of --load-format dummy."""
    config = read_config(folder)
    with torch.device(device):
        causal: PreTrainedModel = class_of(config).from_config(
            config, dtype=dtype, attn_implementation=text_attention(config, NAME)
        )
    for name, parameter in causal.named_parameters():
        fill_with_noise(name, parameter.data)
    return causal
