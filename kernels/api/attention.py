"""The attention layer: heads, options and the paged cache of one layer, and the backends that serve it.

Shapes: T new tokens, H query heads, K KV heads, D head size. Models call it through `unified_attention`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedKV, Prefill
from tandem.kernels.api.errors import BackendUnavailableError
from tandem.kernels.api.metadata import AttentionMetadata, PagedAttentionMetadata, RowBatch
from tandem.kernels.api.selection import load_backend, rank_backends, run_with_fallback, select_backend
from tandem.kernels.api.spec import AttentionSpec, AttentionType, BlockSparse
from tandem.kernels.blocks.quantization import Scale, scale_for

__all__ = ["Attention", "AttentionType", "bind_kv_cache", "metadata_backend"]


class Attention(nn.Module):
    """One layer's attention over the paged cache. Holds no weights.

    `kv_cache[e]` is the layer's cache of virtual engine e, `[num_blocks, K, 2, block_size, D]` (for a node's pool:
    `pool[:, :, layer]`; of latents with one plane), empty until the runner binds it. `attn_backend`: a backend class,
    its name, or None for the first in the table that fits. Raises UnsupportedOptionError or BackendUnavailableError
    (both ValueError).
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: torch.Tensor | Sequence[float] | None = None,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        kv_cache_dtype: str = "auto",
        blocksparse_params: Mapping[str, Any] | None = None,
        attn_backend: type[AttentionBackend] | AttentionBackend | str | None = None,
        calculate_kv_scales: bool = False,
        layer_name: str = "",
        *,
        attn_type: str = AttentionType.DECODER,
        num_virtual_engines: int = 1,
        attention_chunk: int | None = None,
        sinks: torch.Tensor | None = None,
        latent_size: int | None = None,
        hides_first: bool = False,
    ) -> None:
        super().__init__()
        slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        self.spec = AttentionSpec(
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            alibi_slopes=slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            kv_cache_dtype=kv_cache_dtype,
            blocksparse=None if blocksparse_params is None else BlockSparse.from_params(blocksparse_params),
            attn_type=attn_type,
            attention_chunk=attention_chunk,
            sinks=sinks,
            latent_size=latent_size,
            hides_first=hides_first,
        )
        self.layer_name = layer_name
        self.calculate_kv_scales = calculate_kv_scales
        self.kv_cache: list[torch.Tensor] = [torch.empty(0) for _ in range(num_virtual_engines)]
        self.k_scale: Scale = 1.0
        self.v_scale: Scale = 1.0
        self._requested = _backend_name(attn_backend)
        self._chains: dict[tuple[torch.device, torch.dtype, str, int | None], list[type[AttentionBackend]]] = {}
        self._impls: dict[type[AttentionBackend], AttentionImpl] = {}
        self._in_full_heads: dict[tuple[int, int], Attention] = {}

    def keep_kv_as(self, kv_cache_dtype: str, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        """Says in which dtype, and with which scales, the cache keeps KV, if that was not known when the layer was
        made. To be called before anything is stored."""
        assert not self._impls, "the layer has been used"
        self.spec = replace(self.spec, kv_cache_dtype=kv_cache_dtype)
        self.k_scale, self.v_scale = k_scale, v_scale

    def take_sinks(self, sinks: torch.Tensor) -> None:
        """Says the sinks [num_heads], if they were not known when the layer was made. To be called before it is
        used."""
        assert not self._impls, "the layer has been used"
        self.spec = replace(self.spec, sinks=sinks)
        self._chains = {}

    def over_another_cache(self) -> Attention:
        """The same layer over a second cache of the dtype that is computed in, not bound yet. This one stays as it
        is."""
        other = copy.copy(self)
        other.spec, other.k_scale, other.v_scale = replace(self.spec, kv_cache_dtype="auto"), 1.0, 1.0
        other.kv_cache, other._chains, other._impls = [torch.empty(0)], {}, {}
        return other

    def in_full_heads(self, num_heads: int, head_size: int) -> Attention:
        """Attention of so many of this layer's heads, each with a key and a value made of the latents. Made once."""
        if (num_heads, head_size) not in self._in_full_heads:
            other = self.over_another_cache()
            other.spec = replace(
                other.spec, num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, latent_size=None
            )
            self._in_full_heads[num_heads, head_size] = other
        return self._in_full_heads[num_heads, head_size]

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Takes the layer's only cache, `[num_blocks, K, planes, block_size, D]`."""
        self.kv_cache = [kv_cache]
        self.spec.slopes_on(kv_cache.device)  # copied now, since a captured graph holds no copy from a host
        self.spec.sinks_on(kv_cache.device)

    @property
    def impl(self) -> AttentionImpl:
        """The implementation that serves this layer on its cache's device (in the cache's or the default dtype)."""
        return self._impl_of(self.first_backend())

    @property
    def shares_prefixes(self) -> bool:
        """Whether decode reads what rows share once, when metadata.shared_prefixes says so."""
        spec = self.spec
        return (
            spec.sees_every_token
            and spec.latent_size is None
            and spec.attn_type == AttentionType.DECODER
            and self.first_backend().shares_prefixes
        )

    def can_be_captured(self, device: torch.device, dtype: torch.dtype, block_size: int) -> bool:
        """Whether decode steps over a cache of this kind may be replayed as a CUDA graph."""
        return self.backends(device, dtype, self.spec.attn_type, block_size)[0].follows_captured_lengths

    def first_backend(self) -> type[AttentionBackend]:
        """The backend that serves this layer on its cache, in the cache's dtype or, where that is fp8, the default."""
        cache = self.kv_cache[0]
        dtype = cache.dtype if cache.element_size() > 1 else torch.get_default_dtype()
        return self.backends(cache.device, dtype, self.spec.attn_type, _block_size(cache))[0]

    def backends(
        self, device: torch.device, dtype: torch.dtype, attn_type: str, block_size: int | None = None
    ) -> list[type[AttentionBackend]]:
        """The backend that serves such tensors, then those it may fall to. Chosen once."""
        key = (device, dtype, attn_type, block_size)
        if key not in self._chains:
            spec = self.spec if attn_type == self.spec.attn_type else _with_type(self.spec, attn_type)
            first, _ = select_backend(device, dtype, spec.head_size, spec, self._requested, block_size)
            usable, _ = rank_backends(device, dtype, spec.head_size, spec, block_size)
            self._chains[key] = usable[usable.index(first) :]
        return self._chains[key]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata | PagedAttentionMetadata,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        attn_type: str = AttentionType.DECODER,
        kv_is_stored: bool = False,
    ) -> torch.Tensor:
        """Stores the new KV (unless `kv_is_stored`) and attends; output like query.

        query [T, H, D], [T, H * D] or [batch, seq, H * D].
        In the batch form row i's tokens are its first `query_lens[i]`; the rest is padding and comes back as zeros.
        `kv_cache` may be flat, [2, num_blocks, K * block_size * D]. Metadata in the short form is of whole prompts.
        A scale that is not 1.0 replaces the layer's own (given in `k_scale`/`v_scale` or computed on first use).
        """
        if kv_cache.dim() == 3:
            kv_cache = _layer_of_flat(kv_cache, self.spec)
        if isinstance(attn_metadata, PagedAttentionMetadata):
            attn_metadata = attn_metadata.in_blocks_of(kv_cache.shape[3])
        if self.calculate_kv_scales:
            self.maybe_calc_kv_scales(key, value)
        k_scale = self.k_scale if _is_one(k_scale) else k_scale
        v_scale = self.v_scale if _is_one(v_scale) else v_scale
        spec = self.spec
        picked = _batch_tokens(query, spec, attn_metadata)
        q = _as_heads(query, spec.num_heads, spec.head_size, picked)
        cross = attn_type == AttentionType.ENCODER_DECODER
        k = _as_heads(key, spec.num_kv_heads, spec.head_size, None if cross else picked)
        v = _as_heads(value, spec.num_kv_heads, spec.head_size, None if cross else picked)

        def attempt(backend: type[AttentionBackend]) -> torch.Tensor:
            impl = self._impl_of(backend)
            if kv_is_stored:
                kv = PagedKV.of_layer(kv_cache, k_scale, v_scale) if kv_cache.numel() else None
                return impl.attend(q, k, v, kv, attn_metadata)
            return impl.forward(self, q, k, v, kv_cache, attn_metadata, k_scale, v_scale, attn_type)

        output = run_with_fallback(self.backends(query.device, query.dtype, attn_type, _block_size(kv_cache)), attempt)
        if picked is None:
            return output.view(query.shape)
        padded = query.new_zeros(query.shape[0] * query.shape[1], query.shape[2])
        padded[picked] = output.reshape(-1, query.shape[2])
        return padded.view(query.shape)

    def store(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: AttentionMetadata
    ) -> None:
        """Stores key/value [T, K, D] without attending. Raises what the backend raises."""
        if self.calculate_kv_scales:
            self.maybe_calc_kv_scales(key, value)
        first = self.backends(key.device, key.dtype, self.spec.attn_type, _block_size(kv_cache))[0]
        kv = PagedKV.of_layer(kv_cache, self.k_scale, self.v_scale) if kv_cache.numel() else None
        self._impl_of(first).store(key, value, kv, attn_metadata)

    def decode(self, query: torch.Tensor, kv_cache: torch.Tensor, rows: RowBatch) -> torch.Tensor:
        """Attention of decode rows alone, [N, H, D] -> [N, H, D]; of latents, elements from `latent_size` on are
        undefined. Their KV is stored."""
        kv = PagedKV.of_layer(kv_cache, self.k_scale, self.v_scale)
        usable = self.backends(query.device, query.dtype, self.spec.attn_type, kv.block_size)
        return run_with_fallback(usable, lambda backend: backend.get_ops().decode(query, kv, rows, self.spec))

    def prefill(self, new: Prefill) -> torch.Tensor:
        """Attention of prompt rows alone, [T, H, D]. Nothing is stored."""
        block_size = None if new.kv is None else new.kv.block_size
        usable = self.backends(new.q.device, new.q.dtype, self.spec.attn_type, block_size)
        return run_with_fallback(usable, lambda backend: backend.get_ops().prefill(new, self.spec))

    def maybe_calc_kv_scales(self, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        """Sets the scales from the first KV seen, once: what is in the cache was stored with them."""
        if key is None or value is None or key.numel() == 0:
            return
        self.k_scale, self.v_scale = scale_for(key), scale_for(value)
        self.calculate_kv_scales = False

    def _impl_of(self, backend: type[AttentionBackend]) -> AttentionImpl:
        if backend not in self._impls:
            self._impls[backend] = backend.get_impl_cls()(self.spec)
        return self._impls[backend]

    def extra_repr(self) -> str:
        return f"{self.layer_name!r}, heads={self.spec.num_heads}/{self.spec.num_kv_heads}x{self.spec.head_size}"


def metadata_backend(layers: Iterable[Attention]) -> type[AttentionBackend]:
    """The backend that says by which classes steps are described to these layers, whose caches are bound. Raises
    BackendUnavailableError when their backends don't say the same."""
    backends = {layer.first_backend() for layer in layers}
    classes = {(each.get_metadata_cls(), each.get_builder_cls()) for each in backends}
    if len(classes) > 1:
        names = ", ".join(sorted(each.get_name().lower() for each in backends))
        raise BackendUnavailableError(f"layers are served by {names}, which describe steps unlike: choose one of them")
    return backends.pop()


def bind_kv_cache(layers: Mapping[str, Attention], pool: torch.Tensor, layer_of: Sequence[int] = ()) -> None:
    """Gives each layer its cache: layer l, in the order of `layers`, the view `pool[:, :, layer_of[l]]` of a node's
    pool `[num_blocks, K, num_layers, planes, block_size, D]`; without `layer_of`, `pool[:, :, l]`."""
    for index, layer in enumerate(layers.values()):
        layer.bind(pool[:, :, layer_of[index] if layer_of else index])


def _backend_name(backend: type[AttentionBackend] | AttentionBackend | str | None) -> str:
    if backend is None:
        return "auto"
    name = backend if isinstance(backend, str) else backend.get_name()
    if name != "auto":
        load_backend(name)  # an unknown name fails here, not at the first step
    return name


def _layer_of_flat(kv_cache: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """A flat cache [2, num_blocks, K * S * D] as a view [num_blocks, K, 2, S, D]. Raises ValueError."""
    if kv_cache.shape[0] != 2 or kv_cache.shape[2] % (spec.num_kv_heads * spec.head_size):
        heads = f"{spec.num_kv_heads} heads of {spec.head_size}"
        raise ValueError(f"a flat KV cache of {heads} is [2, num_blocks, slots * both], not {tuple(kv_cache.shape)}")
    shaped = kv_cache.view(2, kv_cache.shape[1], spec.num_kv_heads, -1, spec.head_size)
    return shaped.permute(1, 2, 0, 3, 4)


def _block_size(kv_cache: torch.Tensor) -> int | None:
    return kv_cache.shape[3] if kv_cache.dim() == 5 else None


def _with_type(spec: AttentionSpec, attn_type: str) -> AttentionSpec:
    return replace(spec, attn_type=attn_type)


def _is_one(scale: Scale) -> bool:
    return not isinstance(scale, torch.Tensor) and scale == 1.0


def _batch_tokens(query: torch.Tensor, spec: AttentionSpec, metadata: AttentionMetadata) -> torch.Tensor | None:
    """The flat indices of the real tokens of a padded [batch, seq, H * D] query; None for every other form."""
    if query.dim() != 3 or query.shape[1:] == (spec.num_heads, spec.head_size):
        return None
    batch, seq_len, _ = query.shape
    lengths = metadata.encoder_seq_lens_cpu if spec.attn_type == AttentionType.ENCODER else metadata.query_lens_cpu
    if len(lengths) != batch or max(lengths, default=0) > seq_len:
        raise ValueError(f"query is {tuple(query.shape)}, but the metadata has rows of {lengths} new tokens")
    indices = [row * seq_len + index for row, length in enumerate(lengths) for index in range(length)]
    return torch.tensor(indices, dtype=torch.long, device=query.device)


def _as_heads(tensor: torch.Tensor, num_heads: int, head_size: int, picked: torch.Tensor | None) -> torch.Tensor:
    """Any accepted form to [T, heads, head_size]."""
    if tensor is None:
        return tensor
    if tensor.shape[-2:] != (num_heads, head_size):
        if tensor.shape[-1] != num_heads * head_size:
            raise ValueError(f"expected {num_heads} heads of {head_size}, got a tensor of {tuple(tensor.shape)}")
        tensor = tensor.reshape(-1, num_heads, head_size)
    return tensor if picked is None else tensor.reshape(-1, num_heads, head_size)[picked]
