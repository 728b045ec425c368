"""What single architectures need changed before sequences can be packed into one row of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tandem.engine.models.hf.attention import NAME, QueryScale

# Scalings that look at how long a batch is: one request's tokens would depend on its neighbours'.
ROPE_BY_LENGTH = ("dynamic", "longrope")


class _UnlessOurs:
    """True while the model runs by its own attention."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def __bool__(self) -> bool:
        return self._config._attn_implementation != NAME


def adapt(causal: PreTrainedModel) -> None:
    """In place."""
    modules: Iterable[Any] = causal.modules()
    for module in modules:
        if _changes_by_length(module):
            # As it is for lengths up to max_model_len; looking for the longest would wait for the device, too.
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
        if type(module).__name__ == "Llama4TextAttention" and module.attn_temperature_tuning and not module.use_rope:
            module.attn_temperature_tuning = _UnlessOurs(module.config)
            module.tandem_query_scale = QueryScale(module.floor_scale, module.attn_scale)


def _changes_by_length(module: Any) -> bool:
    """Whether it is a rotary embedding that depends on the longest sequence of a batch."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in ROPE_BY_LENGTH for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
