"""The backend interface: what each attention backend answers and implements.

Shapes: T new tokens, H query heads, K KV heads, D head size, N rows, S slots a block; a layer's cache is
kv_NKPSD = [num_blocks, K, 2, S, D] (plane 0 keys, plane 1 values), usually a strided view of the node's pool. A
cache of latents has one plane, which is read as both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder, RowBatch
from tandem.kernels.api.spec import AttentionSpec, AttentionType
from tandem.kernels.blocks.quantization import FP8_DTYPE, Scale


class PagedKV(NamedTuple):
    """One layer's cache as two views [num_blocks, K, S, D] with contiguous D, and the fp8 scales."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0

    @classmethod
    def of_layer(cls, kv_layer: torch.Tensor, k_scale: Scale = 1.0, v_scale: Scale = 1.0) -> PagedKV:
        assert kv_layer.dim() == 5, f"not a KV layer: {tuple(kv_layer.shape)}"
        assert kv_layer.shape[2] in (1, 2), f"dimension 2 is keys and values, got {tuple(kv_layer.shape)}"
        return cls(kv_layer[:, :, 0], kv_layer[:, :, -1], k_scale, v_scale)

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[2]

    @property
    def is_fp8(self) -> bool:
        return self.key_cache.dtype == FP8_DTYPE


def kv_layer_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Shape of one layer within a node's pool."""
    return (num_blocks, num_kv_heads, 2, block_size, head_size)


class Prefill(NamedTuple):
    """The new tokens of rows: q [T, H, D], k and v [T, K, D]. `kv` holds earlier tokens; None: there are none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: PagedKV | None
    rows: RowBatch


class PagedOps(ABC):
    """The three operations of a paged backend, without layer or metadata objects around them."""

    @staticmethod
    @abstractmethod
    def write(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        """Stores key/value [T, K, D] at `slot_mapping` [T]; slot -1 is skipped. fp8 saturates and counts."""

    @staticmethod
    @abstractmethod
    def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        """query [N, H, D], one token a row, whose KV is already stored -> [N, H, D]. Rows of length 0 give zeros."""

    @staticmethod
    @abstractmethod
    def prefill(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        """[T, H, D]: each new token attends to its row's earlier ones and causally to the new ones."""


class AttentionImpl(ABC):
    """A backend's implementation for one layer."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(
        self,
        attn_layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        attn_type: str = AttentionType.DECODER,
    ) -> torch.Tensor:
        """Writes key/value [T, K, D] to `kv_cache`, attends with query [T, H, D] -> [T, H, D].

        An empty `kv_cache` means: nothing is stored and no row has earlier tokens (profiling, encoders).
        """

    @abstractmethod
    def store(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV | None, meta: AttentionMetadata) -> None:
        """The first half of `forward` of a decoder: writes key/value [T, K, D], nothing without a cache."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: PagedKV | None, meta: AttentionMetadata
    ) -> torch.Tensor:
        """The second half: the new keys and values are in the cache already. Decode rows don't read key and value."""


class BoundLayer(Protocol):
    """What is asked of a layer whose cache is bound (kernels/api/attention.py)."""

    spec: AttentionSpec
    kv_cache: list[torch.Tensor]
    calculate_kv_scales: bool

    @property
    def impl(self) -> AttentionImpl: ...


class CapturedAttention(Protocol):
    """Attention that graphs hold: per graph `begin`, then `attend` for one layer after the other; per step `fill`."""

    @property
    def most_rows(self) -> int:
        """Rows of one token that it has room for; a graph has at least as many tokens."""

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether there is room for these rows."""

    def fill(self, metadata: AttentionMetadata) -> None:
        """Says what the next replays attend to."""

    def begin(self) -> None:
        """Begins the layers of one graph."""

    def attend(
        self,
        layer: BoundLayer,
        query_GHD: torch.Tensor,
        key_GKD: torch.Tensor,
        value_GKD: torch.Tensor,
        meta: AttentionMetadata,
        kv_is_stored: bool,
    ) -> torch.Tensor:
        """[G, H, D]. `meta` says where keys and values go, unless they are stored. Raises ValueError for tensors that
        it can't read."""


class AttentionBackend(ABC):
    """Static description of a backend: name, classes, cache shape, and what it can't do."""

    accept_output_buffer: bool = False
    supports_quant_query_input: bool = False
    block_multiple: int = 1  # a cache's block size must be a multiple of this
    shares_prefixes: bool = False  # whether decode reads metadata.shared_prefixes
    follows_captured_lengths: bool = True  # whether decode in a captured graph reads each replay's own lengths
    serves_sinks: bool = False
    serves_attention_chunks: bool = False
    serves_latents: bool = False

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]: ...

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """What steps are described by. One of a backend's own adds to AttentionMetadata: where its launch fails, the
        next backend reads the same object."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """What makes metadata of that class, where lengths are known on the host."""
        return AttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of one layer's cache. A backend that asks for another than this, which nodes exchange blocks in, serves
        no layer with a cache."""
        return kv_layer_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    @abstractmethod
    def get_ops() -> type[PagedOps]:
        """The raw paged operations."""

    @staticmethod
    @abstractmethod
    def unavailable_reason() -> str | None:
        """Why this backend can't run in this process at all (package missing, no such device), or None."""

    @staticmethod
    @abstractmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        """Why this backend can't serve such a layer, or None. Names the option."""

    @staticmethod
    def capture(
        layers: Sequence[BoundLayer], most_rows: int, max_tokens: int, max_model_len: int
    ) -> CapturedAttention | None:
        """Attention of these layers, whose caches are bound, as part of captured steps with prompts, of up to
        `max_tokens` tokens with at most `most_rows` rows of one token. None: it is launched between graphs."""
        return None

    @classmethod
    def is_available(cls) -> bool:
        return cls.unavailable_reason() is None


class PagedImpl(AttentionImpl):
    """Common flow over a backend's PagedOps: write, then decode rows and prefill rows, each as one call."""

    ops: type[PagedOps]

    def forward(
        self,
        attn_layer: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        attn_type: str = AttentionType.DECODER,
    ) -> torch.Tensor:
        if attn_type == AttentionType.DECODER:
            kv = PagedKV.of_layer(kv_cache, k_scale, v_scale) if kv_cache.numel() else None
            self.store(key, value, kv, attn_metadata)
            return self.attend(query, key, value, kv, attn_metadata)
        if attn_type == AttentionType.ENCODER_DECODER:
            return self._forward_cross(query, key, value, PagedKV.of_layer(kv_cache, k_scale, v_scale), attn_metadata)
        rows = attn_metadata.encoder_rows(attn_type == AttentionType.ENCODER)
        if sum(rows.query_lens_cpu) != query.shape[0]:
            lengths = rows.query_lens_cpu
            raise ValueError(f"{query.shape[0]} encoder tokens, but encoder_seq_lens add up to {sum(lengths)}")
        return self._attend_both_ways(Prefill(query, key, value, None, rows))

    def _forward_cross(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv: PagedKV,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Encoder KV is written on the step that brings it (`cross_slot_mapping`), and read from the cache always."""
        if meta.encoder_seq_lens is None:
            raise UnsupportedOptionError("attn_type", "cross attention needs encoder_seq_lens and cross_block_tables")
        if meta.cross_slot_mapping is not None and key is not None and value is not None:
            self.ops.write(key, value, kv, meta.cross_slot_mapping)
        return self._attend_cross(query, kv, meta.cross_rows())

    def _attend_both_ways(self, new: Prefill) -> torch.Tensor:
        """Each row attends over all its own tokens -> [T, H, D]."""
        raise UnsupportedOptionError("attn_type", "encoders need the triton or the native backend")

    def _attend_cross(self, query: torch.Tensor, kv: PagedKV, rows: RowBatch) -> torch.Tensor:
        """query [T, H, D], each row over the `seq_lens` tokens in its blocks -> [T, H, D]; zeros over none."""
        raise UnsupportedOptionError("attn_type", "cross attention needs the triton or the native backend")

    def store(self, key: torch.Tensor, value: torch.Tensor, kv: PagedKV | None, meta: AttentionMetadata) -> None:
        if kv is not None:
            self.ops.write(key, value, kv, meta.slot_mapping)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: PagedKV | None, meta: AttentionMetadata
    ) -> torch.Tensor:
        if kv is None:
            return self.ops.prefill(Prefill(query, key, value, None, meta.all_rows()), self.spec)
        num_decode = meta.num_decode_rows
        if num_decode == meta.num_rows:
            return self.ops.decode(query, kv, meta.decode_rows(), self.spec)
        if num_decode == 0:
            return self.ops.prefill(Prefill(query, key, value, kv, meta.prefill_rows()), self.spec)
        output, rest = torch.empty_like(query), slice(num_decode, None)
        output[:num_decode] = self.ops.decode(query[:num_decode], kv, meta.decode_rows(), self.spec)
        new = Prefill(query[rest], key[rest], value[rest], kv, meta.prefill_rows())
        output[rest] = self.ops.prefill(new, self.spec)
        return output


def refuse(*checks: tuple[Any, str]) -> str | None:
    """The message of the first check whose condition is true, or None."""
    return next((message for condition, message in checks if condition), None)
