"""Base of backends whose kernels only know contiguous prompts: everything paged goes to the best general backend."""

from __future__ import annotations

from abc import abstractmethod

import torch

from tandem.kernels.api.backend import PagedKV, PagedOps, Prefill, refuse
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec, AttentionType
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonBackend, TritonOps


class PromptOnlyOps(PagedOps):
    """Subclasses compute prompts without a prefix; writes, decode rows and prefixes are served by `general_ops`."""

    @staticmethod
    @abstractmethod
    def prompt(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        """[T, H, D]: causal within each row. No row has earlier tokens."""

    @staticmethod
    def write(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
        on_gpu = key.is_cuda and TritonBackend.is_available()
        (TritonOps if on_gpu else NativeOps).write(key, value, kv, slot_mapping)

    @classmethod
    def decode(cls, query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        return general_ops(query, kv, spec).decode(query, kv, rows, spec)

    @classmethod
    def prefill(cls, new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        if new.rows.query_lens_cpu == new.rows.seq_lens_cpu:
            return cls.prompt(new, spec)
        return general_ops(new.q, new.kv, spec).prefill(new, spec)


def general_ops(query: torch.Tensor, kv: PagedKV | None, spec: AttentionSpec) -> type[PagedOps]:
    """Triton's operations where they can serve this layer, else native ones."""
    if kv is not None and kv.block_size % 16:
        return NativeOps
    reason = TritonBackend.unavailable_reason() or TritonBackend.unsupported_reason(
        query.device, query.dtype, spec.head_size, spec
    )
    return NativeOps if reason else TritonOps


def common_refusal(device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec) -> str | None:
    """Why no prompt-only kernel here can serve such a layer, or None."""
    return refuse(
        (device.type != "cuda", f"device {device.type}: needs cuda"),
        (dtype not in (torch.float16, torch.bfloat16), f"dtype {dtype}: needs float16 or bfloat16"),
        (head_size > 256 or head_size % 8, f"head_size {head_size}: needs a multiple of 8 up to 256"),
        (options.is_fp8, "kv_cache_dtype fp8"),
        (options.blocksparse is not None, "blocksparse_params"),
        (options.attn_type != AttentionType.DECODER, f"attn_type {options.attn_type}"),
    )
