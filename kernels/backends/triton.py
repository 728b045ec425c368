"""Tandem's own Triton kernels: paged prefill, paged decode V1 and V2, cache writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch

from tandem.kernels.api.backend import (
    AttentionBackend,
    AttentionImpl,
    BoundLayer,
    CapturedAttention,
    PagedImpl,
    PagedKV,
    PagedOps,
    Prefill,
    refuse,
)
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec, AttentionType
from tandem.kernels.blocks.quantization import overflow_counter, scale_tensor

LARGEST_HEAD = 256  # elements; the tiles of a larger one are not tried


class TritonOps(PagedOps):
    """Loads the kernels on first use; launches on the tensors' own device."""

    @staticmethod
    def write(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        from tandem.kernels.triton_kernels.blocks.cache_write import cache_write

        device = key.device
        with torch.cuda.device_of(key):
            cache_write(
                key, value, kv.key_cache, kv.value_cache, slot_mapping.reshape(-1),
                k_scale=scale_tensor(kv.k_scale, device), v_scale=scale_tensor(kv.v_scale, device),
                overflow=overflow_counter(device),
            )  # fmt: skip

    @staticmethod
    def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        from tandem.kernels.backends.triton_decode import decode

        with torch.cuda.device_of(query):
            return decode(query, kv, rows, spec)

    @staticmethod
    def prefill(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        from tandem.kernels.backends.triton_prefill import prefill

        with torch.cuda.device_of(new.q):
            return prefill(new, spec)


class TritonImpl(PagedImpl):
    """A layer's attention by Tandem's kernels: causal, both ways, and to an encoder's output."""

    ops = TritonOps

    def _attend_both_ways(self, new: Prefill) -> torch.Tensor:
        from tandem.kernels.backends.triton_prefill import prefill

        with torch.cuda.device_of(new.q):
            return prefill(new, self.spec, causal=False)

    def _attend_cross(self, query: torch.Tensor, kv: PagedKV, rows: RowBatch) -> torch.Tensor:
        from tandem.kernels.backends.triton_prefill import prefill

        spec = self.spec
        if rows.max_query_len == 1 and sum(rows.query_lens_cpu) == rows.num_rows and _has_no_positions(spec):
            return self.ops.decode(query, kv, rows, spec)
        if "after_encoder" not in rows.scratch:
            rows.scratch["after_encoder"] = _after_encoder(rows)
        no_keys = query[:, : spec.num_kv_heads]
        with torch.cuda.device_of(query):
            return prefill(Prefill(query, no_keys, no_keys, kv, rows.scratch["after_encoder"]), spec, causal=False)


def _has_no_positions(spec: AttentionSpec) -> bool:
    """Whether a key's weight doesn't depend on where it is."""
    return spec.sees_every_token and spec.alibi_slopes is None


def _after_encoder(rows: RowBatch) -> RowBatch:
    """The same rows with their new tokens behind the encoder's, as prefixes have them."""
    lengths = tuple(new + length for new, length in zip(rows.query_lens_cpu, rows.seq_lens_cpu, strict=True))
    return replace(
        rows, seq_lens=rows.seq_lens + rows.query_start_loc.diff(), seq_lens_cpu=lengths,
        max_seq_len=max(lengths, default=0), scratch={},
    )  # fmt: skip


class TritonBackend(AttentionBackend):
    """Tandem's kernels on CUDA devices of compute capability 8.0 and more, or under Triton's interpreter."""

    shares_prefixes = True
    serves_sinks = True
    serves_attention_chunks = True
    serves_latents = True
    block_multiple = 16  # the smallest tile of a product

    @staticmethod
    def get_name() -> str:
        return "TRITON"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return TritonImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return TritonOps

    @staticmethod
    def capture(
        layers: Sequence[BoundLayer], most_rows: int, max_tokens: int, max_model_len: int
    ) -> CapturedAttention | None:
        if why_not_captured(layers) is not None:
            return None
        from tandem.kernels.backends.triton_captured import TritonCapturedAttention

        return TritonCapturedAttention(layers, most_rows, max_tokens, max_model_len)

    @staticmethod
    def unavailable_reason() -> str | None:
        if find_spec("triton") is None:
            return "the triton package is not installed"
        return None if torch.cuda.is_available() or _interpreted() else "Triton kernels need a CUDA device"

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        return refuse(
            (device.type != "cuda" and not _interpreted(), f"device {device.type}: Triton kernels need cuda"),
            (capability < (8, 0), f"compute capability {capability}: Triton kernels need 8.0"),
            (dtype not in (torch.float16, torch.bfloat16, torch.float32), f"dtype {dtype}"),
            (
                head_size > LARGEST_HEAD and options.latent_size is None,
                f"head_size {head_size} is above {LARGEST_HEAD}",
            ),
            (
                options.is_fp8 and capability < (8, 9),
                f"kv_cache_dtype fp8 needs compute capability 8.9, not {capability}",
            ),
            (
                options.blocksparse is not None and options.blocksparse.block_size % 16,
                "blocksparse_params: block_size is no multiple of 16",
            ),
            (
                options.attention_chunk is not None and options.sliding_window is not None,
                "attention_chunk beside sliding_window",
            ),
            (
                options.attention_chunk is not None and options.attn_type != AttentionType.DECODER,
                f"attention_chunk with attn_type {options.attn_type}",
            ),
            (
                options.hides_first and (options.sliding_window is not None or options.attention_chunk is not None),
                "hides_first beside sliding_window or attention_chunk",
            ),
        )


def why_not_captured(layers: Sequence[BoundLayer]) -> str | None:
    """Why steps with prompts through these layers, whose caches are bound, can't be captured with their attention;
    None: they can."""
    from tandem.kernels.backends.triton_prefill import why_general_layer

    for layer in layers:
        cache, spec = layer.kv_cache[0], layer.spec
        if not isinstance(layer.impl, TritonImpl):
            return "its attention isn't Triton's"
        if spec.attn_type != AttentionType.DECODER or spec.latent_size is not None or layer.calculate_kv_scales:
            return "it attends to latents, to an encoder, or with scales that aren't known yet"
        if cache.element_size() == 1:
            return "the prefixes of its cache are unpacked for each step"
        if (reason := why_general_layer(cache.device, cache.dtype, spec)) is not None:
            return reason
    return None


@cache
def _interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process (tests)."""
    if not os.environ.get("TRITON_INTERPRET") or find_spec("triton") is None:
        return False  # without an import, which nodes without a GPU need not wait for
    from triton import knobs

    return bool(knobs.runtime.interpret)
