"""What a forward pass carries beside its tensors: attention metadata, layers by name, the layer hooks, adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from tandem.kernels.api.attention import Attention
    from tandem.kernels.api.metadata import AttentionMetadata
    from tandem.kernels.products.adapter_rows import AdapterRows


class LayerHooks(Protocol):
    """Called by `unified_attention` around each layer. Both enqueue work on streams; the first may wait on the host."""

    def wait_for_kv_layer(self, layer_name: str) -> None:
        """Enqueues, before the layer touches its KV, a wait for loads of that layer that are under way, or waits until
        they are over."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        """Enqueues, after the layer wrote its KV, the push of `kv_layer`'s new tokens."""


class LayerCuts(Protocol):
    """Takes the place of each layer's attention in a pass that is captured in parts."""

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_name: str, kv_is_stored: bool
    ) -> torch.Tensor:
        """Ends the part before this attention and begins the next one. Returns where the output will stand, like
        `query`."""


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass. `attn_metadata` is one object for all layers or a mapping from layer name."""

    attn_metadata: AttentionMetadata | Mapping[str, AttentionMetadata]
    no_compile_layers: Mapping[str, Attention] = field(default_factory=dict)
    virtual_engine: int = 0
    hooks: LayerHooks | None = None
    adapters: AdapterRows | None = None  # None: no row of this pass takes an adapter
    cuts: LayerCuts | None = None  # None: attention is computed

    def metadata_of(self, layer_name: str) -> AttentionMetadata:
        if isinstance(self.attn_metadata, Mapping):
            if layer_name not in self.attn_metadata:
                raise KeyError(f"the forward context has no attention metadata for layer {layer_name!r}")
            return self.attn_metadata[layer_name]
        return self.attn_metadata

    def any_metadata(self) -> AttentionMetadata | None:
        """Some layer's: rows and lengths are the same in all. None: there is no layer."""
        if isinstance(self.attn_metadata, Mapping):
            return next(iter(self.attn_metadata.values()), None)
        return self.attn_metadata

    def layer(self, layer_name: str) -> Attention:
        if layer_name not in self.no_compile_layers:
            raise KeyError(f"the forward context has no attention layer {layer_name!r}: add it to no_compile_layers")
        return self.no_compile_layers[layer_name]


_current = threading.local()


def slots_of_pass(num_tokens: int) -> torch.Tensor | None:
    """int64 [T]: where the KV of this thread's pass goes, below 0: a token is padding. None: that isn't at hand, since
    there is no pass, or tokens were left out before its last layer."""
    context: ForwardContext | None = getattr(_current, "context", None)
    slots_T: torch.Tensor | None = getattr(context and context.any_metadata(), "slot_mapping", None)
    return slots_T if slots_T is not None and len(slots_T) == num_tokens else None


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes `context` current in this thread for the duration of the block; contexts nest."""
    previous = getattr(_current, "context", None)
    _current.context = context
    try:
        yield context
    finally:
        _current.context = previous


def get_forward_context() -> ForwardContext:
    """The current thread's context. Raises RuntimeError outside `set_forward_context`."""
    context: ForwardContext | None = getattr(_current, "context", None)
    if context is None:
        raise RuntimeError("no forward context in this thread: call inside `with set_forward_context(...)`")
    return context
