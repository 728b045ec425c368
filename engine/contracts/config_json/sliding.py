"""Which layers a config.json gives a sliding window. No torch."""

from __future__ import annotations

from msgspec import UNSET

from tandem.engine.contracts.config_json.fields import (
    DeepseekFields,
    ExpertFields,
    GptOssFields,
    KnownFields,
    LlamaFields,
    MistralFields,
    Qwen3MoeFields,
)
from tandem.engine.contracts.rope_config import LAYER_TYPES


def sliding_layers_of(fields: KnownFields) -> tuple[int | None, tuple[bool, ...]]:
    """The window in tokens, and for each layer whether it has the window (empty: all do). Raises ValueError."""
    if isinstance(fields, DeepseekFields):
        if fields.sliding_window is not None or fields.layer_types is not None:
            raise ValueError(
                "sliding windows are not supported beside latents; take sliding_window and layer_types out"
            )
        return None, ()
    if isinstance(fields, MistralFields):
        if fields.layer_types is not UNSET:
            raise ValueError("layer_types makes a mistral model a ministral one, which is not supported")
        return fields.sliding_window, ()
    if isinstance(fields, GptOssFields):
        return fields.sliding_window, _alternating(fields)
    if isinstance(fields, ExpertFields):
        if fields.layer_types is not None:
            raise ValueError("layer_types is not supported beside experts: all layers attend alike; take it out")
        may_slide = not isinstance(fields, Qwen3MoeFields) or fields.use_sliding_window
        return fields.sliding_window if may_slide else None, ()
    types, num_layers = fields.layer_types, fields.num_hidden_layers
    _check_types(types, num_layers)
    slides = types is not None and "sliding_attention" in types
    if isinstance(fields, LlamaFields):
        # transformers would cut such a model's cache by the window, but not its prompt's attention.
        window = fields.sliding_window
        if slides or (window is not None and window < fields.max_position_embeddings):
            raise ValueError("a sliding window is not supported for llama; take sliding_window and layer_types out")
        return None, ()
    window = fields.sliding_window if fields.use_sliding_window else None
    if window is None:
        if slides:
            raise ValueError("layer_types names sliding_attention, but use_sliding_window or sliding_window is not set")
        return None, ()
    if types is not None:
        return window, tuple(kind == "sliding_attention" for kind in types)
    return window, tuple(layer >= fields.max_window_layers for layer in range(num_layers))


def _alternating(fields: GptOssFields) -> tuple[bool, ...]:
    """For each layer whether it has the window: every second, from the first on, where nothing else is said. Raises
    ValueError."""
    num_layers, types = fields.num_hidden_layers, fields.layer_types
    if types is None:
        types = [LAYER_TYPES[1 - layer % 2] for layer in range(num_layers)]
    _check_types(types, num_layers)
    if fields.sliding_window is None:
        raise ValueError("sliding_window is not set, without which transformers builds no gpt_oss; name it")
    return tuple(kind == "sliding_attention" for kind in types)


def _check_types(types: list[str] | None, num_layers: int) -> None:
    """Raises ValueError unless each layer is of a known type, or nothing is said."""
    if types is not None and (len(types) != num_layers or not set(types) <= set(LAYER_TYPES)):
        raise ValueError(f"layer_types must say {' or '.join(LAYER_TYPES)} {num_layers} times")
