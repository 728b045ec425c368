"""What the folder of an EAGLE-3 head says about it, checked. No torch.

Keys as SafeAILab's EAGLE, SpecForge and vLLM write and read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.contracts.model_config import ModelConfig, model_config_of
from tandem.engine.contracts.model_shape import ModelShape

# What changes how a head computes, and isn't computed here, by what it is where nothing is changed.
NOT_BUILT = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_injection_mode": "fused_fc",
    "logit_scale": 1.0,
    "ptd_token_id": None,
}


class EagleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An EAGLE-3 head: a Llama layer over features of the served model, with a vocabulary of its own."""

    layer: ModelConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...]  # of the served model: those into which the hidden states go that are its features
    normalises_residual: bool = False


def load_eagle_config(folder: Path, served: ModelShape) -> EagleConfig:
    """Raises CheckpointError for what is no head, ConfigError for one that isn't for the served model."""
    path = folder / "config.json"
    raw = read_json_object(path)
    if raw is None:
        raise CheckpointError(f"{folder} has no config.json: it is no folder of an EAGLE-3 head")
    own = raw.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{path}: eagle_config is no object; fetch the head again")
    every = {**raw, **own}
    for name, value in NOT_BUILT.items():
        if every.get(name, value) not in (value, None):
            raise CheckpointError(f"{path}: {name} is {every[name]!r}: such heads are not built; choose another")
    if every.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(f"{path}: use_aux_hidden_state is not true: only EAGLE-3 heads are built")
    layer = model_config_of(
        raw | {"model_type": raw.get("model_type") or "llama", "architectures": ["LlamaForCausalLM"]}, path
    )
    _check_layer(path, layer, every, served)
    return EagleConfig(
        layer=layer,
        draft_vocab_size=_draft_vocab_size(path, raw, layer),
        feature_layers=_feature_layers(path, every, served.num_layers),
        normalises_residual=every.get("norm_before_residual") is True,
    )


def _check_layer(path: Path, layer: ModelConfig, raw: dict[str, Any], served: ModelShape) -> None:
    if layer.num_layers != 1:
        raise CheckpointError(f"{path}: an EAGLE-3 head has one layer, not {layer.num_layers}")
    if layer.quantisation is not None:
        raise CheckpointError(f"{path}: quantised heads are not built; choose one of 16 bits")
    features = raw.get("target_hidden_size") or layer.hidden_size
    for what, own, others in (
        ("hidden_size", layer.hidden_size, served.hidden_size),
        ("target_hidden_size", features, served.hidden_size),
        ("vocab_size", layer.vocab_size, served.vocab_size),
        ("num_key_value_heads", layer.num_kv_heads, served.num_kv_heads),
        ("head_dim", layer.head_dim, served.head_dim),
    ):
        if own != others:
            raise ConfigError(
                f"--speculative-config: {what} of the head is {own}, of the served model {others}: its keys lie beside "
                "that model's, and it reads that model's hidden states; take a head made for this model"
            )


def _draft_vocab_size(path: Path, raw: dict[str, Any], layer: ModelConfig) -> int:
    size = raw.get("draft_vocab_size") or layer.vocab_size
    if not isinstance(size, int) or not 0 < size <= layer.vocab_size:
        raise CheckpointError(f"{path}: draft_vocab_size is {size!r}, of {layer.vocab_size} tokens; repair the file")
    return size


def _feature_layers(path: Path, raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    given = raw.get("eagle_aux_hidden_state_layer_ids") or default_feature_layers(num_layers)
    is_list = isinstance(given, Sequence) and all(isinstance(one, int) and 0 <= one < num_layers for one in given)
    if not is_list or len(given) != 3 or list(given) != sorted(set(given)):
        raise CheckpointError(
            f"{path}: the features are the inputs of layers {given!r}: they must be three, rising, of the served "
            f"model's {num_layers}; give others as eagle_aux_hidden_state_layer_ids"
        )
    return tuple(given)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high one, as heads are trained."""
    return (2, num_layers // 2, num_layers - 3)
