"""Reads a Hugging Face model folder's config.json into a frozen `ModelConfig`. No torch: the router uses it too.

Understands what transformers wrote before and since version 5 (`rope_theta` and `rope_scaling` or `rope_parameters`,
`torch_dtype` or `dtype`). Missing fields get the default that transformers gives that architecture. Whatever would
change the computation and isn't built is refused by name with CheckpointError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.engine.errors import CheckpointError, ConfigError
from tandem.engine.model_folder import resolve_model
from tandem.engine.rope_config import RopeConfig, parse_rope

__all__ = ["FAMILIES", "ModelConfig", "load_model_config", "resolve_model"]


@dataclass(frozen=True)
class _Family:
    """What distinguishes one architecture's defaults and options from another's in config.json."""

    max_position_embeddings: int
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    reads_attention_bias: bool = False  # attention_bias sets the biases of q, k, v and o
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: str = "none"  # or "all" (sliding_window), "flag" (use_sliding_window and layer_types)


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(2048, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(131072, windows="all"),
    "Qwen2ForCausalLM": _Family(32768, qkv_bias=True, windows="flag"),
    "Qwen3ForCausalLM": _Family(32768, default_head_dim=128, reads_attention_bias=True, qk_norm=True, windows="flag"),
}
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. `layer_windows[i]` is layer i's sliding window in tokens, its own included, or None."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint, one of DTYPES
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hidden_act: str

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @property
    def sliding_window(self) -> int | None:
        """The window that every layer has; None when any layer sees the whole sequence."""
        return self.layer_windows[0] if len(set(self.layer_windows)) == 1 else None

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """This model limited to `max_model_len` tokens (0: its own limit). Raises ConfigError beyond its own."""
        if max_model_len < 0 or max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len {max_model_len} is outside 1 … {self.max_model_len}, which the model was made for; "
                "choose a smaller one, or scale the rope in the model's config.json"
            )
        return replace(self, max_model_len=max_model_len or self.max_model_len)


def load_model_config(folder: Path) -> ModelConfig:
    """Parses `folder`/config.json and, for the end-of-sequence ids, generation_config.json if there is one.

    Raises CheckpointError that names the file and what to do.
    """
    path = folder / "config.json"
    fields = Fields(path, read_json_object(path, missing="the folder is no Hugging Face model folder"))
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    _refuse_unbuilt(fields)
    num_heads = fields.positive("num_attention_heads")
    num_layers = fields.positive("num_hidden_layers")
    max_positions = fields.positive("max_position_embeddings", family.max_position_embeddings)
    rope = parse_rope(fields.values, max_positions, str(path))
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
    config = ModelConfig(
        architecture=architecture,
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive("num_key_value_heads", num_heads),
        head_dim=fields.positive("head_dim", family.default_head_dim or fields.positive("hidden_size") // num_heads),
        vocab_size=fields.positive("vocab_size"),
        max_model_len=rope.max_model_len(max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(fields, family, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(folder, fields),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
    )
    _check_heads(config, path)
    return config


class Fields:
    """Typed access to one JSON file's fields. null counts as missing; a wrong type raises CheckpointError."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: the field {name!r} is missing; copy the model's config.json again")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = default if self.values.get(name) is None else self.values[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = default if self.values.get(name) is None else self.values[name]
        if value not in allowed:
            raise CheckpointError(f"{self.path}: {name} {value!r} is not supported, only {', '.join(allowed)}")
        return str(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; () when missing."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} must be {wanted}, got {self.values.get(name)!r}")


def read_json_object(path: Path, missing: str) -> dict[str, Any]:
    """A JSON file's top-level object. `missing` says what its absence means."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: {missing}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object; copy the file again")
    return values


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{fields.path}: architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return name


def _refuse_unbuilt(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        method = fields.get("quantization_config")
        kind = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        raise CheckpointError(
            f"{fields.path}: quantization_config ({kind}) is not supported; use the float32, bfloat16 or float16 model"
        )


def _layer_windows(fields: Fields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window in every layer (4096 unless it says null). Qwen: only with use_sliding_window, in the layers
    that layer_types names, or from max_window_layers on."""
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise fields.wrong("layer_types", f"a list of {num_layers} names")
    unknown = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}, key=str)
    if unknown:
        raise CheckpointError(f"{fields.path}: layer_types holds {unknown[0]!r}, which is not supported")
    if family.windows == "none":
        return (None,) * num_layers
    if family.windows == "all":
        if len(set(kinds or ())) > 1:
            raise CheckpointError(f"{fields.path}: layer_types that differ are not supported for this architecture")
        if "sliding_window" in fields.values and fields.get("sliding_window") is None:
            return (None,) * num_layers
        return (fields.positive("sliding_window", 4096),) * num_layers
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    window = fields.positive("sliding_window", 4096)
    if kinds is None:
        first = fields.values.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise fields.wrong("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    value = "float32" if value in (None, "auto") else value
    if value not in DTYPES:
        raise CheckpointError(f"{fields.path}: {name} {value!r} is not supported, only {', '.join(DTYPES)}")
    return str(value)


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json wins where it names any, as in transformers."""
    path = folder / "generation_config.json"
    if path.exists():
        generation = Fields(path, read_json_object(path, missing="it was there a moment ago"))
        ids = generation.ids("eos_token_id")
        if ids:
            return ids
    return fields.ids("eos_token_id")


def _check_heads(config: ModelConfig, path: Path) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {config.num_heads} is no multiple of num_key_value_heads "
            f"{config.num_kv_heads}; copy the model's config.json again"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {config.head_dim} is odd, rotary embeddings need an even one")
