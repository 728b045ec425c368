"""A model folder's config.json as transformers reads it: the fields that others than the model itself need.

Sizes of heads and the number of layers are what the modules really ask of attention, found by a pass of an empty model
on the meta device (layers.py), not what a field of some name says.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import eos_token_ids, read_json_object, token_ids
from tandem.engine.contracts.weights.quantisation import MXFP4, Quantisation, read_quantisation
from tandem.engine.contracts.wire.parts import EncoderFacts
from tandem.engine.models.hf.adapters import ROPE_BY_LENGTH, let_ours_be_named
from tandem.engine.models.hf.encoder_config import read_encoder
from tandem.engine.models.hf.layers import LayerNeeds, look_at

DTYPES = ("float32", "bfloat16", "float16")
REFUSED_IF_SET = {"auto_map": "code that comes with a model is not run; use a checkpoint whose code is in transformers"}


class HFConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of transformers. `head_dim` is the widest of its keys and values; `digest` is of all of config.json.
    With an encoder, sizes are the decoder's, and `max_model_len` counts both sides' positions."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    digest: str
    layers: tuple[LayerNeeds, ...]
    cross_layers: tuple[LayerNeeds, ...] = ()  # the decoder's attention to the output of its encoder
    encoder: EncoderFacts | None = None
    quantisation: Quantisation | None = None  # of the decoder's linear layers
    rope: None = None  # part of the digest

    @property
    def latent_size(self) -> None:
        """None: keys and values are kept, of each head."""
        return None


def load_hf_config(folder: Path) -> HFConfig:
    """The configuration of a folder for transformers. Raises CheckpointError that says why it can't be served."""
    config = read_config(folder)
    raw = read_json_object(folder / "config.json") or {}
    for name, why in REFUSED_IF_SET.items():
        if raw.get(name) is not None:
            raise CheckpointError(f"{folder / 'config.json'}: {name} is set: {why}")
    try:
        found = look_at(deepcopy(config))  # building a model writes into it
    except ValueError as error:
        raise CheckpointError(f"{folder}: {config.model_type} can't be served: {error}") from error
    first = found.layers[0]
    text = config.get_text_config()
    ends = eos_token_ids(folder) or token_ids(_of_either("eos_token_id", config))
    begin = _of_either("bos_token_id", config)
    encoder = read_encoder(folder, config, found.vocab_size) if config.is_encoder_decoder else None
    return HFConfig(
        architecture=str(config.model_type),
        hidden_size=found.hidden_size,
        num_layers=len(found.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=found.vocab_size,
        max_model_len=_max_model_len(text) if encoder is None else encoder.max_model_len,
        dtype=_dtype(config),
        eos_token_ids=tuple(one for one in ends if 0 <= one < found.vocab_size),
        bos_token_id=begin if isinstance(begin, int) else None,
        digest=hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:32],
        layers=found.layers,
        cross_layers=found.cross_layers,
        encoder=encoder,
        quantisation=_quantisation(folder, raw, is_encoder_decoder=config.is_encoder_decoder),
    )


def _quantisation(folder: Path, raw: dict[str, Any], *, is_encoder_decoder: bool) -> Quantisation | None:
    """Raises CheckpointError for what isn't supported."""
    try:
        found = read_quantisation(raw)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    if found is not None and (found.stored == MXFP4 or is_encoder_decoder):
        what = "experts in MXFP4" if found.stored == MXFP4 else "an encoder"
        raise CheckpointError(
            f"{folder / 'config.json'}: quantised weights are not supported for models with {what} that run by "
            "transformers' modules; use the bf16 checkpoint"
        )
    return found


def read_config(folder: Path) -> PreTrainedConfig:
    """config.json as transformers parses it. Raises CheckpointError."""
    _quiet()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder / 'config.json'}: transformers can't read it: {said}") from error
    try:
        let_ours_be_named(config)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {config.model_type} can't be served: {error}") from error
    vars(config).pop("quantization_config", None)  # whoever builds the model would look for libraries that read it
    for each in (config, config.get_text_config()):
        each.pad_token_id = None  # nothing is padded, and some models look for it among the tokens, at each step
    return config


@cache
def _quiet() -> None:
    """Silences transformers' warnings, which are about training and about fields that we read ourselves."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _of_either(name: str, config: PreTrainedConfig) -> Any:
    """A field of the whole model's configuration, or else of the language model's within it."""
    value = getattr(config, name, None)
    return getattr(config.get_text_config(), name, None) if value is None else value


def _max_model_len(config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens. Raises CheckpointError when no field says it."""
    names = ("max_position_embeddings", "seq_length", "max_seq_len")  # the latter two where nothing embeds a position
    length = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if not isinstance(length, int) or not 1 <= length < 1 << 31:
        raise CheckpointError(f"{config.model_type}: max_position_embeddings says no length in tokens: {length!r}")
    for rope in _ropes(config):
        if rope.get("rope_type") in ROPE_BY_LENGTH:
            original = rope.get("original_max_position_embeddings") or length
            length = min(length, int(original))
    return length


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary embedding's parameters, of each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or [given]


def _dtype(config: PreTrainedConfig) -> str:
    name = str(_of_either("dtype", config) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{config.model_type}: dtype {name} is not supported; supported: {', '.join(DTYPES)}")
    return name
