"""Attention of a layer from its merged QKV projection: rotation, cache write and attention, fused where Triton runs.

Legend: T tokens of the step, N of them wanted, H query heads, K KV heads, D head size, C = (H + 2K) * D, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.api.unified_attention import unified_attention
from tandem.kernels.backends.triton import TritonImpl
from tandem.kernels.blocks.quantization import overflow_counter, scale_tensor
from tandem.kernels.products import few_rows_attention
from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.adapters import added, rotation_adds
from tandem.kernels.products.fused_ops import CacheSlots, HeadNorms, is_fused, rope_and_store, rotate_heads


def traced_rotary_attention(
    qkv_TC: torch.Tensor,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    layer: Attention,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """[T, H * D]: `rotary_attention` as torch.compile can trace it, which reads nothing of the forward pass but inside
    the one op."""
    heads, kv_heads, size = layer.spec.num_heads, layer.spec.num_kv_heads, layer.spec.head_size
    query, key, value = rotate_heads(qkv_TC, position_T, cos_sin_PD, heads, kv_heads, norms)
    return unified_attention(query, key, value, layer.layer_name).view(-1, heads * size)


@dataclass(frozen=True)
class WantedTokens:
    """The tokens of a step whose hidden states somebody asks for. `index` int64 [N] into the T tokens.

    `metadata` describes them as decode rows: token i attends to its own sequence up to itself.
    """

    index: torch.Tensor
    metadata: AttentionMetadata


class UpToAttention(NamedTuple):
    """A layer up to its attention, of T tokens: what that takes in, the residual stream, both [T, hidden size], and
    its keys and values before they are rotated [T, 2K * D]."""

    x: torch.Tensor
    residual: torch.Tensor
    kv: torch.Tensor


def rotary_attention(
    product_TC: torch.Tensor | UnaddedProduct,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    layer_name: str,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """[T, H * D]. The product is overwritten. Hooks run as in `unified_attention`."""
    layer = get_forward_context().layer(layer_name)
    heads, kv_heads, size = layer.spec.num_heads, layer.spec.num_kv_heads, layer.spec.head_size
    qkv_TC = product_TC.out if isinstance(product_TC, UnaddedProduct) else product_TC
    is_one_launch, stores_here = _is_one_launch(layer, qkv_TC, layer_name), _stores_here(layer, qkv_TC)
    if isinstance(product_TC, UnaddedProduct) and (is_one_launch or not stores_here or not rotation_adds(product_TC)):
        added(product_TC)
        product_TC = qkv_TC
    if is_one_launch:
        slots, metadata = _slots_of(layer, layer_name), get_forward_context().metadata_of(layer_name)
        assert slots is not None
        tables, lengths = metadata.block_tables, metadata.seq_lens
        out = few_rows_attention.few_rows_attention(
            qkv_TC, cos_sin_PD, tables, lengths, slots, heads, layer.spec.scale, norms
        )
        return out.view(-1, heads * size)
    if not stores_here:
        query, key, value = rotate_heads(qkv_TC, position_T, cos_sin_PD, heads, kv_heads, norms)
        return unified_attention(query, key, value, layer_name).view(-1, heads * size)
    rope_and_store(product_TC, position_T, cos_sin_PD, heads, kv_heads, norms, _slots_of(layer, layer_name))
    query, key, value = qkv_TC.view(-1, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)
    return unified_attention(query, key, value, layer_name, kv_is_stored=True).view(-1, heads * size)


def rotary_attention_of_wanted(
    query_NC: torch.Tensor,
    kv_TC: torch.Tensor,
    position_T: torch.Tensor,
    wanted: WantedTokens,
    cos_sin_PD: torch.Tensor,
    layer_name: str,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """[N, H * D]: the keys and values of all T tokens are stored, but only the wanted tokens attend.

    For a pass's last layer, where nothing else needs the other tokens. `query_NC` [N, H * D] and `kv_TC` [T, 2K * D]
    are overwritten.
    """
    context = get_forward_context()
    layer, metadata = context.layer(layer_name), context.metadata_of(layer_name)
    cache = layer.kv_cache[context.virtual_engine]
    heads, kv_heads, size = layer.spec.num_heads, layer.spec.num_kv_heads, layer.spec.head_size
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(layer_name)
    position_N = position_T[wanted.index]
    if _stores_here(layer, kv_TC):
        rope_and_store(kv_TC, position_T, cos_sin_PD, 0, kv_heads, norms, _slots_of(layer, layer_name))
        rope_and_store(query_NC, position_N, cos_sin_PD, heads, 0, norms)
        query_NHD = query_NC.view(-1, heads, size)
    else:
        _, key, value = rotate_heads(kv_TC, position_T, cos_sin_PD, 0, kv_heads, norms)
        layer.store(key, value, cache, metadata)
        query_NHD, _, _ = rotate_heads(query_NC, position_N, cos_sin_PD, heads, 0, norms)
    if context.hooks is not None:
        context.hooks.save_kv_layer(layer_name, cache, metadata)
    nothing = query_NHD[:0, :kv_heads]  # decode rows read keys and values from the cache
    output = layer(query_NHD, nothing, nothing, cache, wanted.metadata, kv_is_stored=True)
    return output.reshape(-1, heads * size)


def rotary_store(
    kv_TC: torch.Tensor,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    layer_name: str,
    norms: HeadNorms | None = None,
) -> None:
    """Stores the keys and values of all T tokens, and nobody attends. `kv_TC` [T, 2K * D] is overwritten. Hooks run."""
    context = get_forward_context()
    layer, metadata = context.layer(layer_name), context.metadata_of(layer_name)
    cache, kv_heads = layer.kv_cache[context.virtual_engine], layer.spec.num_kv_heads
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(layer_name)
    if _stores_here(layer, kv_TC):
        rope_and_store(kv_TC, position_T, cos_sin_PD, 0, kv_heads, norms, _slots_of(layer, layer_name))
    else:
        _, key, value = rotate_heads(kv_TC, position_T, cos_sin_PD, 0, kv_heads, norms)
        layer.store(key, value, cache, metadata)
    if context.hooks is not None:
        context.hooks.save_kv_layer(layer_name, cache, metadata)


def _is_one_launch(layer: Attention, qkv_TC: torch.Tensor, layer_name: str) -> bool:
    """A step of few decode rows and nothing else, of a layer that our Hopper kernels serve. In one launch no row sees
    what another stores."""
    context = get_forward_context()
    metadata, cache = context.metadata_of(layer_name), layer.kv_cache[context.virtual_engine]
    if not _stores_here(layer, qkv_TC) or metadata.num_decode_rows < metadata.num_tokens or context.hooks is not None:
        return False
    if metadata.rows_follow or metadata.shared_prefixes is not None:
        return False
    if not few_rows_attention.has_kernel(qkv_TC.device):
        return False
    reason = few_rows_attention.why_not(metadata.num_tokens, qkv_TC.dtype, layer.spec, cache)
    return reason is None and isinstance(layer.impl, TritonImpl)


def _stores_here(layer: Attention, tensor: torch.Tensor) -> bool:
    """Scales that are still to be computed need the rotated keys before the store."""
    return is_fused(tensor) and not layer.calculate_kv_scales


def _slots_of(layer: Attention, layer_name: str) -> CacheSlots | None:
    context = get_forward_context()
    cache = layer.kv_cache[context.virtual_engine]
    if cache.numel() == 0:
        return None
    scales = None
    if cache.element_size() == 1:
        device = cache.device
        scales = scale_tensor(layer.k_scale, device), scale_tensor(layer.v_scale, device), overflow_counter(device)
    slot_mapping = context.metadata_of(layer_name).slot_mapping
    return CacheSlots(cache[:, :, 0], cache[:, :, 1], slot_mapping, scales)
