"""What transformers' modules call for attention: ours, over the paged cache of the current forward pass.

Registered under a name that transformers' masks don't know, so it builds none: sequences packed into one row of tokens
are told apart by our metadata alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tandem.engine.parallel.sharding import Shard
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.api.spec import AttentionType
from tandem.kernels.api.unified_attention import unified_attention

NAME = "tandem"


class OwnHeads(NamedTuple):
    """Which of a layer's heads a rank has; attention takes them out where a projection gives all."""

    num_heads: int  # of the whole layer,
    num_kv_heads: int
    queries: slice
    keys: slice

    @classmethod
    def of(cls, shard: Shard, num_heads: int, num_kv_heads: int) -> OwnHeads:
        own, kv_heads = num_heads // shard.size, shard.kv_heads(num_kv_heads)
        queries = slice(shard.rank * own, (shard.rank + 1) * own)
        return cls(num_heads, num_kv_heads, queries, slice(kv_heads.start, kv_heads.stop))

    def out_of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of this rank's heads, [1, heads, T, D] each."""
        if query.shape[1] == self.num_heads:
            query = query[:, self.queries]
        if key.shape[1] == self.num_kv_heads:
            key, value = key[:, self.keys], value[:, self.keys]
        return query, key, value


class AttentionCall(NamedTuple):
    """What one layer asked of attention: the sizes of its heads, and options."""

    layer: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    is_causal: bool
    alibi_slopes: tuple[float, ...] | None
    is_cross: bool = False
    module: nn.Module | None = None


class QueryScale(NamedTuple):
    """Makes queries at later positions longer: Llama 4's "temperature tuning", which its own module would do by the
    place in the packed row instead of the position."""

    every: float  # positions
    by: float

    def of(self, positions_T: torch.Tensor) -> torch.Tensor:
        """The factor of the queries at each position, float32 [T, 1, 1]."""
        return (torch.log1p(torch.floor((positions_T.float() + 1.0) / self.every)) * self.by + 1.0)[:, None, None]


_thread = threading.local()


@contextmanager
def recorded() -> Iterator[list[AttentionCall]]:
    """Within its `with` block, gathers what this thread's forward passes ask of attention, in order. No attention is
    computed there."""
    calls: list[AttentionCall] = []
    _thread.calls = calls
    try:
        yield calls
    finally:
        del _thread.calls


@contextmanager
def at_positions(positions_T: torch.Tensor) -> Iterator[None]:
    """Within its `with` block, tells attention the positions of the tokens of this thread's forward pass."""
    _thread.positions = positions_T
    try:
        yield
    finally:
        del _thread.positions


def step_positions() -> torch.Tensor | None:
    """The positions of the tokens of this thread's forward pass, int64 [T]; None in a pass that isn't ours."""
    return getattr(_thread, "positions", None)


@contextmanager
def storing(metadata: AttentionMetadata) -> Iterator[None]:
    """Within its `with` block, cross attention of this thread stores the keys and values that it is given where
    `metadata` says, and attends to nothing."""
    _thread.storing = metadata
    try:
        yield
    finally:
        del _thread.storing


def is_storing() -> bool:
    return getattr(_thread, "storing", None) is not None


@contextmanager
def without_attending() -> Iterator[None]:
    """Within its `with` block, self attention of this thread stores the keys and values that it is given, and makes
    zeros."""
    _thread.attends_not = True
    try:
        yield
    finally:
        del _thread.attends_not


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def index_of(module: Any) -> int:
    """The index of the layer that an attention module belongs to."""
    return int(module.layer_idx)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] (value may be of another width) -> [1, T, H, value's width].

    Options that don't change from call to call were read by `look_at` and are ignored here. Heads narrower than the
    pool's are padded with zeros.
    """
    assert attention_mask is None, "no mask is made for an attention of this name"
    layer, width = index_of(module), value.shape[3]
    own_heads: OwnHeads | None = getattr(module, "tandem_heads", None)
    if own_heads is not None:
        query, key, value = own_heads.out_of(query, key, value)
    calls = None if torch.compiler.is_compiling() else getattr(_thread, "calls", None)
    if calls is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        sizes = query.shape[1], key.shape[1], key.shape[3], width
        is_causal = bool(getattr(module, "is_causal", True)) and more.get("is_causal") is not False
        is_cross = not is_causal and key.shape[2] != query.shape[2]
        head = AttentionCall(layer, *sizes, scale, sliding_window, softcap, s_aux is not None, is_causal, alibi_slopes)
        calls.append(head._replace(is_cross=is_cross, module=module))
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None
    widest = max(query.shape[3], width)
    q_THD, k_TKD, v_TKD = (_tokens_first(each, widest) for each in (query, key, value))
    cross: Attention | None = getattr(module, "tandem_cross", None)
    if cross is not None:
        output = _cross_attention(cross, q_THD, k_TKD, v_TKD)
        return output[None, :, :, :width], None
    query_scale: QueryScale | None = getattr(module, "tandem_query_scale", None)
    if query_scale is not None:
        q_THD = (q_THD * query_scale.of(_thread.positions)).to(q_THD.dtype)
    if getattr(_thread, "attends_not", False):
        _store(k_TKD, v_TKD, layer_name(layer))
        return torch.zeros_like(q_THD)[None, :, :, :width], None
    output = unified_attention(q_THD, k_TKD, v_TKD, layer_name(layer))
    return output[None, :, :, :width], None


def _store(k_TKD: torch.Tensor, v_TKD: torch.Tensor, name: str) -> None:
    """What `unified_attention` does of a layer, without attention."""
    context = get_forward_context()
    layer, metadata = context.layer(name), context.metadata_of(name)
    cache = layer.kv_cache[context.virtual_engine]
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(name)
    layer.store(k_TKD, v_TKD, cache, metadata)
    if context.hooks is not None:
        context.hooks.save_kv_layer(name, cache, metadata)


def _cross_attention(layer: Attention, q_THD: torch.Tensor, k_EKD: torch.Tensor, v_EKD: torch.Tensor) -> torch.Tensor:
    """[T, H, D]: the tokens' attention to their rows' encoder output, whose keys and values are in the cache. While
    `storing` those are put there instead, and the result holds zeros."""
    stored: AttentionMetadata | None = getattr(_thread, "storing", None)
    if stored is not None:
        layer.store(k_EKD, v_EKD, layer.kv_cache[0], stored)
        return torch.zeros_like(q_THD)
    metadata = get_forward_context().metadata_of(layer.layer_name)
    nothing = q_THD[:0, : layer.spec.num_kv_heads]
    return layer(q_THD, nothing, nothing, layer.kv_cache[0], metadata, attn_type=AttentionType.ENCODER_DECODER)


def _tokens_first(heads: torch.Tensor, width: int) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads, width], contiguous, zeros past D."""
    tokens = heads[0].transpose(0, 1)
    return functional.pad(tokens, (0, width - tokens.shape[2])) if tokens.shape[2] < width else tokens.contiguous()


AttentionInterface.register(NAME, paged_attention)
assert NAME not in AttentionMaskInterface(), "a mask would be made"
