"""torch's built-in flash attention for prompts without a prefix, one call a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedImpl, PagedOps, Prefill, refuse
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.prompt_only import PromptOnlyOps, common_refusal


class TorchFlashOps(PromptOnlyOps):
    """Prompts by `scaled_dot_product_attention` with the flash kernel, all else by the general backend."""

    @staticmethod
    def prompt(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        output = torch.empty_like(new.q)
        start = 0
        for length in new.rows.query_lens_cpu:
            tokens = slice(start, start + length)
            start += length
            if not length:
                continue
            q, k, v = (x[tokens].transpose(0, 1)[None] for x in (new.q, new.k, new.v))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=spec.scale, enable_gqa=spec.group_size > 1
                )
            output[tokens] = out[0].transpose(0, 1)
        return output


class TorchFlashImpl(PagedImpl):
    """A layer's attention by torch's flash kernel."""

    ops = TorchFlashOps


class TorchFlashBackend(AttentionBackend):
    """torch's flash attention on CUDA devices, without ALiBi, windows or soft caps."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_FLASH"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return TorchFlashImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return TorchFlashOps

    @staticmethod
    def unavailable_reason() -> str | None:
        return None if torch.cuda.is_available() else "torch's flash attention needs a CUDA device"

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        return common_refusal(device, dtype, head_size, options) or refuse(
            (options.alibi_slopes is not None, "alibi_slopes"),
            (options.sliding_window is not None, "sliding_window"),
            (options.logits_soft_cap is not None, "logits_soft_cap"),
        )
