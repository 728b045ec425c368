"""Operations of a decoder layer between its matrix products, fused into one launch each where Triton runs.

Elsewhere the same is computed step by step in PyTorch: the eager twins below, which are also what tests compare with.
Legend: T tokens, E hidden size, G = 2F gate and up, H query heads, K KV heads, D head size, C = (H + 2K) * D,
P positions, R rows, V vocabulary; in 8 bits M rows, K inputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn import functional

from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.quantised_weight import FP8, FP8_MAX


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_is_unfused = ContextVar("unfused", default=False)  # each thread has its own


@contextmanager
def unfused() -> Iterator[None]:
    """Within its `with` block this thread takes no fused operation and no product of ours: torch computes the same."""
    token = _is_unfused.set(True)
    try:
        yield
    finally:
        _is_unfused.reset(token)


def may_fuse() -> bool:
    """Whether this thread is outside of `unfused`."""
    return not _is_unfused.get()


def is_fused(tensor: torch.Tensor) -> bool:
    """Whether the kernels serve tensors like this one. torch.compile traces the twins, and fuses them itself."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and _has_triton() and may_fuse()


# --- embedding and norms ----------------------------------------------------------------------------------------


def embedding(id_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
    """[T, E]: the rows of these tokens, int32 or int64 [T]."""
    if is_fused(table_VE):
        from tandem.kernels.triton_kernels.products.fused import embedding_triton

        return embedding_triton(id_T, table_VE)
    return functional.embedding(id_T, table_VE)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation (arXiv 1910.07467): statistics in fp32, the weight in the input's dtype."""
    if is_fused(x_TE) and x_TE.dim() == 2:
        from tandem.kernels.triton_kernels.products.fused import rms_norm_triton

        return rms_norm_triton(x_TE, None, weight_E, eps)
    x32 = x_TE.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight_E * normed.to(x_TE.dtype)


def add_rms_norm(
    x_TE: torch.Tensor | UnaddedProduct, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, in its dtype; returns the sum normalised. Of adapters those that `norm_adds` names."""
    if isinstance(x_TE, UnaddedProduct):
        from tandem.kernels.triton_kernels.products.fused import rms_norm_triton

        return rms_norm_triton(x_TE.out, residual_TE, weight_E, eps, adapted=x_TE)
    if is_fused(x_TE):
        from tandem.kernels.triton_kernels.products.fused import rms_norm_triton

        return rms_norm_triton(x_TE, residual_TE, weight_E, eps)
    residual_TE += x_TE
    return rms_norm(residual_TE, weight_E, eps)


def silu_mul(gate_up_TG: torch.Tensor, group: int = 0) -> torch.Tensor:
    """silu of the first half of the columns, times the second half; `group` > 0: the halves come by turns, `group`
    columns of each (kernels/products/matmul.py, group_gate_up)."""
    if is_fused(gate_up_TG):
        from tandem.kernels.triton_kernels.products.fused import silu_mul_triton

        return silu_mul_triton(gate_up_TG, group)
    group = group or gate_up_TG.shape[1] // 2
    turns = gate_up_TG.view(gate_up_TG.shape[0], gate_up_TG.shape[1] // (2 * group), 2, group)
    gate, up = turns.unbind(2)
    return (functional.silu(gate) * up).flatten(1)


# --- activations in 8 bits ---------------------------------------------------------------------------------------


def quantise_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [M, K] and fp32 [M, 1]: each row divided by its scale, so that its largest number is the format's."""
    if is_fused(x_MK):
        from tandem.kernels.triton_kernels.products.quantise_rows import quantise_rows_triton

        return quantise_rows_triton(x_MK)
    scale = (x_MK.abs().amax(1, keepdim=True).float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (x_MK.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


# --- rotary embedding and cache write ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each query and key head before rotation (Qwen3). Weights [D]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """Where keys and values go: caches [num_blocks, K, S, D], `slot_mapping` int64 [T] (-1: nowhere).

    `scales` (fp8 caches): k and v fp32 [1] and the overflow counter int64 [1].
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


def rope_and_store(
    qkv_TC: torch.Tensor | UnaddedProduct,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
    slots: CacheSlots | None = None,
) -> None:
    """Rotates queries and keys inside `qkv_TC` in place (NeoX halves) and stores keys and values. CUDA only. Of
    adapters it adds those that `rotation_adds` names.

    `cos_sin_PD` fp32: row p holds cos, then sin of position p's D / 2 angles. Raises ValueError elsewhere.
    """
    from tandem.kernels.triton_kernels.products.rotation import rope_and_store_triton

    adapted = qkv_TC if isinstance(qkv_TC, UnaddedProduct) else None
    qkv_TC = qkv_TC.out if isinstance(qkv_TC, UnaddedProduct) else qkv_TC
    if not is_fused(qkv_TC):
        raise ValueError(f"rope_and_store needs Triton and a CUDA tensor, not {qkv_TC.device}: use rotate_heads")
    rope_and_store_triton(
        qkv_TC, position_T, cos_sin_PD, num_heads, num_kv_heads,
        None if norms is None else (norms.q_weight, norms.k_weight, norms.eps),
        None if slots is None else (slots.key_cache, slots.value_cache, slots.slot_mapping),
        None if slots is None else slots.scales,
        adapted,
    )  # fmt: skip


def rotate_heads(
    qkv_TC: torch.Tensor,
    position_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eager twin of `rope_and_store` without the store: new query [T, H, D], key, value [T, K, D]. Any device."""
    head_size = cos_sin_PD.shape[1]
    heads = qkv_TC.view(-1, num_heads + 2 * num_kv_heads, head_size)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        query, key = _eager_norm(query, norms.q_weight, norms.eps), _eager_norm(key, norms.k_weight, norms.eps)
    angles_TD = cos_sin_PD.index_select(0, position_T).to(qkv_TC.dtype)
    cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in angles_TD.chunk(2, dim=-1))
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value.contiguous()


def _eager_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D


def rotate_halves(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """New query and key, heads rotated by halves (NeoX). C = D, of each half its own angles, or D / 2. Heads are
    contiguous."""
    if is_fused(query_THD):
        from tandem.kernels.triton_kernels.products.rotation import rotate_halves_triton

        return rotate_halves_triton(query_THD, key_TKD, cos_TC, sin_TC)
    if cos_TC.shape[1] < query_THD.shape[2]:
        cos_TC, sin_TC = (torch.cat((part, part), dim=-1) for part in (cos_TC, sin_TC))
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    return _rotate(query_THD, cos, sin).to(query_THD.dtype), _rotate(key_TKD, cos, sin).to(key_TKD.dtype)


# --- greedy sampling --------------------------------------------------------------------------------------------


def argmax_tokens(logits_RV: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the most likely token of each row, the lowest id of equals."""
    if is_fused(logits_RV):
        from tandem.kernels.triton_kernels.sampling.argmax import argmax_triton

        return argmax_triton(logits_RV)
    return logits_RV.argmax(dim=-1)
