"""The custom op that models call for attention.

Shapes: T new tokens, H query heads, K KV heads, D head size. A model calls `unified_attention(q, k, v, layer_name)`;
everything else about the step comes from the forward context.
"""

from __future__ import annotations

import torch

from tandem.kernels.api.forward_context import get_forward_context


def unified_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_name: str, kv_is_stored: bool = False
) -> torch.Tensor:
    """Attention of one layer of the current forward pass, as one custom op (`tandem::unified_attention`).

    query [T, H, D] (or [T, H * D]), key/value [T, K, D] -> like query. Waits for the layer's KV, attends, saves the
    layer's KV, the first and last through the forward context's hooks if it has any. `kv_is_stored`: key and value are
    in the cache already (kernels/products/rotary_attention.py).
    """
    output: torch.Tensor = torch.ops.tandem.unified_attention(query, key, value, layer_name, kv_is_stored)
    return output


def _unified_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_name: str, kv_is_stored: bool
) -> torch.Tensor:
    context = get_forward_context()
    if context.cuts is not None:
        return context.cuts.attention(query, key, value, layer_name, kv_is_stored)
    layer = context.layer(layer_name)
    metadata = context.metadata_of(layer_name)
    kv_cache = layer.kv_cache[context.virtual_engine]
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(layer_name)
    output = layer.forward(
        query, key, value, kv_cache, metadata, attn_type=layer.spec.attn_type, kv_is_stored=kv_is_stored
    )
    if context.hooks is not None:
        context.hooks.save_kv_layer(layer_name, kv_cache, metadata)
    return output


def _unified_attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_name: str, kv_is_stored: bool
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


_library = torch.library.Library("tandem", "FRAGMENT")
_library.define(
    "unified_attention(Tensor query, Tensor key, Tensor value, str layer_name, bool kv_is_stored) -> Tensor"
)
_library.impl("unified_attention", _unified_attention, "CompositeExplicitAutograd")
torch.library.register_fake("tandem::unified_attention", _unified_attention_fake, lib=_library)
