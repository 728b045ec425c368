"""What a Hugging Face folder says about its model: config.json and generation_config.json, checked. No torch.

Reads both transformers 5's `rope_parameters` / `dtype` and the older `rope_theta` / `rope_scaling` / `torch_dtype`.
Whatever this engine does not compute exactly is refused by name rather than ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.errors import CheckpointError
from tandem.engine.model_folder import resolve_model

__all__ = ["ModelConfig", "RopeConfig", "load_model_config", "resolve_model"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; which fields count depends on `rope_type`."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder that engine/model can build. Sizes in elements, `window` in tokens (the current one included)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # per layer, empty: all layers alike
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def window_of(self, layer: int) -> int | None:
        if self.sliding_window is None or (self.sliding_layers and not self.sliding_layers[layer]):
            return None
        return self.sliding_window


def load_model_config(folder: Path) -> ModelConfig:
    """Raises CheckpointError that names the file and what to do."""
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise CheckpointError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")
    config_path = folder / "config.json"
    architecture = _architecture(raw, config_path)
    try:
        config = _parse(raw, architecture, config_path)
        eos = _token_ids((_read_json(folder / "generation_config.json") or {}).get("eos_token_id"))
        eos = eos or _token_ids(raw.get("eos_token_id"))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{config_path}: {what}; repair the file or fetch the model again") from error
    return msgspec.structs.replace(config, eos_token_ids=eos)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch the model again")
    return value


def _architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and raw.get("model_type") in ARCHITECTURES.values():
        return str(raw["model_type"])
    found = ", ".join(names) or raw.get("model_type") or "none"
    raise CheckpointError(f"{path}: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _parse(raw: dict[str, Any], architecture: str, path: Path) -> ModelConfig:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path}: quantised weights are not supported; use the bf16, fp16 or fp32 checkpoint")
    num_heads = int(raw["num_attention_heads"])
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{path}: {num_heads} query heads can't share {num_kv_heads} KV heads")
    hidden_size = int(raw["hidden_size"])
    bias = architecture in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    window, layers = _sliding(raw, architecture, path)
    rope = _rope(raw, path)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(raw.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_heads)),
        vocab_size=int(raw["vocab_size"]),
        max_model_len=_max_model_len(int(raw["max_position_embeddings"]), rope),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        qkv_bias=architecture == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        sliding_layers=layers,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=raw.get("bos_token_id"),
    )
    if config.dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"{path}: dtype {config.dtype} is not supported; supported: float32, bfloat16, float16")
    if min(config.hidden_size, config.num_layers, config.vocab_size, config.max_model_len, config.head_dim) < 1:
        raise CheckpointError(f"{path}: a size is not positive; repair the file")
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {config.head_dim} is odd; rotary embeddings need an even one")
    return config


def _sliding(raw: dict[str, Any], architecture: str, path: Path) -> tuple[int | None, tuple[bool, ...]]:
    """Mistral: one window in every layer, 4096 unless the file says otherwise or null. Qwen: only if
    use_sliding_window, in the layers that layer_types names or from max_window_layers on. As in transformers."""
    num_layers = int(raw["num_hidden_layers"])
    types = raw.get("layer_types")
    if types and (len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}):
        raise CheckpointError(f"{path}: layer_types must say full_attention or sliding_attention {num_layers} times")
    if architecture == "llama":
        return None, ()
    if architecture == "mistral":
        if types and len(set(types)) > 1:
            raise CheckpointError(f"{path}: layer_types that differ are not supported for mistral")
        window = raw.get("sliding_window", 4096)
        return (int(window) if window else None), ()
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window", False) or not window:
        return None, ()
    if types:
        return int(window), tuple(kind == "sliding_attention" for kind in types)
    first = int(raw.get("max_window_layers", 28))
    return int(window), tuple(layer >= first for layer in range(num_layers))


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = str(given.get("rope_type") or given.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{path}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = raw.get("partial_rotary_factor") or given.get("partial_rotary_factor")
    if partial is not None and float(partial) != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=_number(given, "factor"))
    beside = raw.get("original_max_position_embeddings")
    original = int(beside or given.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    if rope_type == "llama3":
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=_number(given, "factor"),
            low_freq_factor=_number(given, "low_freq_factor"),
            high_freq_factor=_number(given, "high_freq_factor"),
            original_max_position_embeddings=original,
        )
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=_number(given, "factor") if given.get("factor") else raw["max_position_embeddings"] / original,
        original_max_position_embeddings=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _number(given: dict[str, Any], name: str) -> float:
    value = float(given[name])
    if not 0 < value < float("inf"):
        raise ValueError(f"rope {name} must be positive, got {value}")
    return value


def _max_model_len(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Linear checkpoints name the length before scaling, yarn checkpoints that or the one after it."""
    if rope.rope_type == "linear":
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn":
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
