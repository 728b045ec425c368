"""What single architectures need changed before sequences can be packed into one row of tokens."""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.engine.models.hf import experts
from tandem.engine.models.hf.attention import NAME, QueryScale, paged_attention
from tandem.engine.models.hf.routers import own_router

# Rope scalings that depend on the longest sequence of a batch: a request's tokens would depend on its neighbours.
ROPE_BY_LENGTH = ("dynamic", "longrope")


class _UnlessOurs:
    """An object that is true while the model runs its own attention, and false while it runs ours."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def __bool__(self) -> bool:
        return self._config._attn_implementation != NAME


class _BloomAttention:
    """BLOOM's attention module with ours in the middle. The module's own fused projection stays before it and its
    residual sum after it. The biases by position, which the model passes for one sequence only, are replaced by the
    heads' slopes."""

    def __init__(self, module: Any, config: PreTrainedConfig, slopes: tuple[float, ...]) -> None:
        self._module, self._config, self._slopes = module, config, slopes
        self._own_forward = module.forward

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self._module
        if self._config._attn_implementation != NAME:
            output: tuple[torch.Tensor, torch.Tensor] = self._own_forward(hidden_states, residual, alibi, **more)
            return output
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        attended, _ = paged_attention(module, q, k, v, None, module.inv_norm_factor, alibi_slopes=self._slopes)
        return residual + module.dense(attended.flatten(2)), None


class _MptAttention:
    """MPT's attention module with ours in the middle, between its own projections, by the heads' slopes."""

    def __init__(self, module: Any, config: PreTrainedConfig, slopes: tuple[float, ...]) -> None:
        self._module, self._config, self._slopes = module, config, slopes
        self._own_forward = module.forward

    def __call__(
        self, hidden_states: torch.Tensor, position_bias: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self._module
        if self._config._attn_implementation != NAME:
            output: tuple[torch.Tensor, torch.Tensor] = self._own_forward(hidden_states, position_bias, **more)
            return output
        projected = module.Wqkv(hidden_states)
        if module.clip_qkv:
            projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = projected.unflatten(2, (3, module.n_heads, module.head_dim))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        attended, _ = paged_attention(module, q, k, v, None, module.softmax_scale, alibi_slopes=self._slopes)
        return module.out_proj(attended.flatten(2)), None


class _MptDecoder:
    """MPT's decoder, which can't do without a mask: over our attention it is given one, and nobody looks at it."""

    def __init__(self, module: Any, config: PreTrainedConfig) -> None:
        self._config, self._own_forward = config, module.forward
        self._mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device="cpu")

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        if self._config._attn_implementation == NAME:
            more["attention_mask"] = self._mask
        return self._own_forward(*arguments, **more)


class _FalconAttention:
    """Falcon's attention module with ours in the middle, between its own projections."""

    def __init__(self, module: Any, config: PreTrainedConfig) -> None:
        self._module, self._config = module, config
        self._own_forward = module.forward
        self._rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]

    def __call__(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self._module
        if self._config._attn_implementation != NAME:
            output: tuple[torch.Tensor, torch.Tensor] = self._own_forward(
                hidden_states, position_embeddings=position_embeddings, **more
            )
            return output
        query, key, value = module._split_heads(module.query_key_value(hidden_states))
        if module.new_decoder_architecture:  # each KV head comes repeated, once a query head of its group
            group = module.num_heads // module.num_kv_heads
            key, value = key[:, :, ::group], value[:, :, ::group]
        q, k = self._rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        attended, _ = paged_attention(module, q, k, value.transpose(1, 2), None, module.inv_norm_factor)
        return module.dense(attended.flatten(2)), None


def let_ours_be_named(config: PreTrainedConfig) -> None:
    """Falcon looks its attention's class up by the attention's name when it is built. Raises ValueError for one with
    ALiBi, whose biases it rounds to bf16: ours are exact."""
    if config.model_type == "falcon":
        if config.alibi:
            raise ValueError("Falcon with ALiBi is not supported")
        from transformers.models.falcon import modeling_falcon

        modeling_falcon.FALCON_ATTENTION_CLASSES.setdefault(NAME, modeling_falcon.FalconAttention)


def adapt(causal: PreTrainedModel) -> bool:
    """Changes the model in place. Returns whether its attention calls ours only because of that change."""
    config: Any = causal.config.get_text_config()
    if getattr(config, "_experts_implementation", None) == experts.REPLACED:
        config._experts_implementation = NAME
    modules: list[Any] = list(causal.modules())
    calls_us = False
    for module in modules:
        if _changes_by_length(module):
            # As it is for lengths up to max_model_len; looking for the longest would wait for the device, too.
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
        if type(module).__name__ == "Llama4TextAttention" and module.attn_temperature_tuning and not module.use_rope:
            module.attn_temperature_tuning = _UnlessOurs(module.config)
            module.tandem_query_scale = QueryScale(module.floor_scale, module.attn_scale)
        if (router := own_router(module)) is not None:
            module.forward = router
        if type(module).__name__ == "BloomAttention":
            module.forward = _BloomAttention(module, causal.config, _bloom_slopes(causal))
            calls_us = True
        if type(module).__name__ == "MptAttention":
            module.forward = _MptAttention(module, causal.config, _mpt_slopes(causal))
            calls_us = True
        if type(module).__name__ == "MptModel":
            module.forward = _MptDecoder(module, causal.config)
        if type(module).__name__ == "FalconAttention":
            module.forward = _FalconAttention(module, causal.config)
            calls_us = True
    return calls_us


def _bloom_slopes(causal: Any) -> tuple[float, ...]:
    """The step of each head's bias from one position to the next."""
    bias_H1P = causal.get_decoder().build_alibi_tensor(torch.ones(1, 2), causal.config.n_head, torch.float32)
    return tuple(bias_H1P[:, 0, 1].tolist())


def _mpt_slopes(causal: Any) -> tuple[float, ...]:
    """The step of each head's bias from one position to the next."""
    bias_H1P = causal.get_decoder().build_mpt_alibi_tensor(causal.config.n_heads, 2)
    return tuple((bias_H1P[:, 0, 1] - bias_H1P[:, 0, 0]).tolist())


def _changes_by_length(module: Any) -> bool:
    """Whether the module is a rotary embedding that depends on the longest sequence of a batch."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in ROPE_BY_LENGTH for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
