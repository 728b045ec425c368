"""xFormers' memory-efficient attention for prompts without a prefix, when the package is installed."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedImpl, PagedOps, Prefill, refuse
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.prompt_only import PromptOnlyOps, common_refusal

memory_efficient_attention_forward: Any = None
BlockDiagonalCausalMask: Any = None
try:
    # By name: without the package that implements them since 0.0.36, `xformers.ops` still imports, but lacks these.
    from xformers.ops import memory_efficient_attention_forward  # type: ignore[no-redef]
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask  # type: ignore[no-redef]

    _import_error = None
except Exception as error:  # a broken build raises more than ImportError
    _import_error = f"xformers can't be imported: {error}"


class XFormersOps(PromptOnlyOps):
    """Prompts by xFormers' operator with a block-diagonal causal mask, all else by the general backend."""

    @staticmethod
    def prompt(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        query, rows = new.q, new.rows
        bias = rows.scratch.get("xformers_bias")
        if bias is None:
            lengths = [length for length in rows.query_lens_cpu if length]
            bias = BlockDiagonalCausalMask.from_seqlens(lengths, device=query.device)
            rows.scratch["xformers_bias"] = bias
        grouped = (1, -1, spec.num_kv_heads, spec.group_size, spec.head_size)
        k, v = (x[None, :, :, None].expand(-1, -1, -1, spec.group_size, -1) for x in (new.k, new.v))
        out = memory_efficient_attention_forward(query.reshape(grouped), k, v, bias, scale=spec.scale)
        return out.reshape(query.shape)


class XFormersImpl(PagedImpl):
    """A layer's attention by xFormers."""

    ops = XFormersOps


class XFormersBackend(AttentionBackend):
    """xFormers on CUDA devices, without ALiBi, windows or soft caps."""

    @staticmethod
    def get_name() -> str:
        return "XFORMERS"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return XFormersImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return XFormersOps

    @staticmethod
    def unavailable_reason() -> str | None:
        return _import_error or (None if torch.cuda.is_available() else "xformers needs a CUDA device")

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        return common_refusal(device, dtype, head_size, options) or refuse(
            (options.alibi_slopes is not None, "alibi_slopes"),
            (options.sliding_window is not None, "sliding_window"),
            (options.logits_soft_cap is not None, "logits_soft_cap"),
        )
