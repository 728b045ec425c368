"""A decoder of transformers with its weights, tried against its own attention before it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.heads.mtp_config import HF_ENDS, check_hf_mtp, layer_prefix, num_mtp_layers
from tandem.engine.models.hf.adapters import adapt
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.config import HFConfig, read_config
from tandem.engine.models.hf.layers import class_of, decoder_of
from tandem.engine.models.hf.loading.quantised import QuantisedLayers
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
    reads_mtp: bool = False,
) -> HFModel:
    """The model in `dtype` on `device`; with a group of either kind this process's part of it. `on_loaded` is told the
    fraction of the weights that is there, from 0 to 1. `reads_mtp`: with the layer behind its last, which guesses.

    Raises CheckpointError for missing, unknown or misshapen tensors, and for a model of which our attention and its
    own make different hidden states; ConfigError where there is no layer that guesses, or none that is computed, and
    for quantised models with experts.
    """
    if reads_mtp:
        check_hf_mtp(folder, config.architecture, config.num_layers, options.load_format)
    assert group is None or config.quantisation is None, "ask `check_shares` first"
    quantised = QuantisedLayers(folder, config.quantisation, options.load_format)
    if options.load_format == "dummy":
        is_whole = group is None and expert_group is None
        causal = _made_up(folder, device if is_whole else torch.device("cpu"), dtype, reads_mtp)
        quantised.find(causal)
    else:
        stored_tensors(folder)  # a torn shard is named at once
        causal = _loaded(folder, dtype, reads_mtp, quantised)
    quantised.put_in(causal, device, dtype)
    adapt(causal)
    if group is not None:
        needs = config.layers + (config.layers[-1:] if reads_mtp else ())
        share_out(causal, needs, group.shard, group)
    mtp_layer = _taken_off(causal) if reads_mtp else None
    if expert_group is not None:
        share_experts_out(causal, expert_group)  # not those of the layer taken off: nodes don't guess together
    for part in (causal, mtp_layer):
        if part is not None:
            part.eval().to(device)
            _fuse(part, device, dtype)
    model = HFModel(causal, config, attention_backend, group, expert_group, mtp_layer)
    check_against_own_attention(model, device, dtype)
    if on_loaded is not None:
        on_loaded(1.0)
    return model


def _fuse(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda":
        with torch.inference_mode():
            fuse_norms(module, device, dtype)
        fuse_rotations(module)


def _taken_off(causal: PreTrainedModel) -> nn.Module:
    """The decoder's last layer, which it has no longer."""
    decoder: Any = decoder_of(causal)[1]
    decoder.config.num_hidden_layers -= 1
    layer: nn.Module = decoder.layers.pop(-1)
    return layer


def _config_of(folder: Path, reads_mtp: bool) -> Any:
    """What transformers makes the model by: with one layer more, which is taken off, where a head is to have it."""
    config = read_config(folder)
    if reads_mtp:
        config.num_hidden_layers += 1
    return config


def _loaded(
    folder: Path, dtype: torch.dtype, reads_mtp: bool = False, quantised: QuantisedLayers | None = None
) -> PreTrainedModel:
    causal: PreTrainedModel
    found: dict[str, Any]
    config = _config_of(folder, reads_mtp)
    num_layers = config.get_text_config().num_hidden_layers
    if reads_mtp:
        others = tuple(f"{layer_prefix(num_layers - 1)}{name}" for name in HF_ENDS)
    else:
        others = tuple(layer_prefix(num_layers + index) for index in range(num_mtp_layers(folder)))
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
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder}: transformers can't load it: {said}; fetch the model again") from error
    if quantised is not None:
        quantised.find(causal)
    for what, why in (
        ("missing_keys", "no shard holds {}; fetch the model again"),
        ("unexpected_keys", "the weights hold {}, which a model of this config.json does not have"),
        ("mismatched_keys", "{} has another shape than config.json asks for; they don't belong together"),
    ):
        names = [each if isinstance(each, str) else each[0] for each in found[what]]  # else with its shapes
        wrong = [name for name in names if what != "unexpected_keys" or not name.startswith(others)]
        wrong = [name for name in wrong if quantised is None or not quantised.explains(name)]
        if wrong:
            raise CheckpointError(f"{folder}: {why.format(min(wrong))}")
    return causal


def _made_up(folder: Path, device: torch.device, dtype: torch.dtype, reads_mtp: bool) -> PreTrainedModel:
    """A model with the made-up weights of --load-format dummy."""
    config = _config_of(folder, reads_mtp)
    with torch.device(device):
        causal: PreTrainedModel = class_of(config).from_config(
            config, dtype=dtype, attn_implementation=text_attention(config, NAME)
        )
    for name, parameter in causal.named_parameters():
        fill_with_noise(name, parameter.data)
    return causal
