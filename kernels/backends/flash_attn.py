"""FlashAttention, when installed: version 3 (`flash_attn_interface`) paged, version 2 (`flash_attn`) prompts only.

Version 2's paged mode wants blocks of 256 tokens, so prefixes and decode rows go to the general backend there.
"""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedImpl, PagedKV, PagedOps, Prefill, refuse
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.prompt_only import PromptOnlyOps, common_refusal


def _try_import(module: str) -> tuple[Any, str]:
    try:
        return __import__(module), ""
    except Exception as error:  # a build for another torch raises more than ImportError
        return None, f"{module} can't be imported: {error}"


version_3: Any
version_2: Any
version_3, _error_3 = _try_import("flash_attn_interface")
version_2, _error_2 = _try_import("flash_attn") if version_3 is None else (None, "")


class FlashAttentionOps(PromptOnlyOps):
    """Prompts by whichever version is installed; with version 3 decode rows and prefixes as well."""

    @staticmethod
    def prompt(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        starts, longest = new.rows.query_start_loc, new.rows.max_query_len
        options = _options(spec)
        if version_3 is None and spec.alibi_slopes is not None:
            options["alibi_slopes"] = spec.slopes_on(new.q.device)
        library = version_3 or version_2
        out = library.flash_attn_varlen_func(new.q, new.k, new.v, starts, starts, longest, longest, **options)
        return out[0] if isinstance(out, tuple) else out

    @classmethod
    def decode(cls, query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        if version_3 is None:
            return super().decode(query, kv, rows, spec)
        return _paged(query, kv, rows, spec)

    @classmethod
    def prefill(cls, new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        if version_3 is None or new.kv is None or new.rows.query_lens_cpu == new.rows.seq_lens_cpu:
            return super().prefill(new, spec)
        return _paged(new.q, new.kv, new.rows, spec)


class FlashAttentionImpl(PagedImpl):
    """A layer's attention by FlashAttention."""

    ops = FlashAttentionOps


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention for GPUs of compute capability 8.0 and more; version 3 for 9.x alone."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTENTION"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return FlashAttentionImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return FlashAttentionOps

    @staticmethod
    def unavailable_reason() -> str | None:
        if version_3 is None and version_2 is None:
            return f"{_error_3}; {_error_2}"
        return None if torch.cuda.is_available() else "FlashAttention needs a CUDA device"

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        reason = common_refusal(device, dtype, head_size, options)
        if reason is not None:
            return reason
        capability = torch.cuda.get_device_capability(device)
        return refuse(
            (
                version_3 is not None and capability[0] != 9,
                f"FlashAttention 3 needs compute capability 9, not {capability}",
            ),
            (capability < (8, 0), f"compute capability {capability}: FlashAttention needs 8.0"),
            (version_3 is not None and options.alibi_slopes is not None, "alibi_slopes (FlashAttention 3)"),
        )


def _options(spec: AttentionSpec) -> dict[str, Any]:
    window = -1 if spec.sliding_window is None else spec.sliding_window - 1
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (window, 0 if window >= 0 else -1),
        "softcap": spec.logits_soft_cap or 0.0,
    }


def _paged(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
    """Attends over all keys through the block table; those of new tokens are already stored. Caches go in as views
    [blocks, S, K, D]."""
    return version_3.flash_attn_with_kvcache(
        query,
        kv.key_cache.transpose(1, 2),
        kv.value_cache.transpose(1, 2),
        cache_seqlens=rows.seq_lens,
        page_table=rows.block_tables,
        cu_seqlens_q=rows.query_start_loc,
        max_seqlen_q=rows.max_query_len,
        **_options(spec),
    )
