"""Eager twins of what decode steps of few rows are made of, in float64. Tests compare against these.

R rows, E inputs, N outputs; H query heads, K KV heads, D head size, C = (H + 2K) * D, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tandem.kernels.products.fused_ops import HeadNorms, rotate_heads
from tandem.kernels.reference.paged import attend_token, read_sequence


def normed(x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation (arXiv 1910.07467)."""
    x_RE = x_RE.double()
    return x_RE * torch.rsqrt(x_RE.pow(2).mean(-1, keepdim=True) + eps) * gain_E.double()


def norm_linear(x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float, weight_NE: torch.Tensor) -> torch.Tensor:
    """The product of the normalised rows with each row of the weight, [R, N]."""
    return normed(x_RE, gain_E, eps) @ weight_NE.double().t()


def norm_linear_silu_mul(
    x_RE: torch.Tensor, gain_E: torch.Tensor, eps: float, gate_up_GE: torch.Tensor
) -> torch.Tensor:
    """silu(gate) * up of the normalised rows, [R, G / 2]; `gate_up_GE` has gate's rows, then up's."""
    gate, up = norm_linear(x_RE, gain_E, eps, gate_up_GE).chunk(2, 1)
    return functional.silu(gate) * up


def attention(
    qkv_RC: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    scale: float,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R, H, D], the new tokens' keys and values [R, K, 2, D]); the caches [blocks, K, S, D] are only read, without
    the new token. Rows of length 0 give zeros."""
    num_kv_heads = key_cache.shape[1]
    if norms is not None:
        norms = HeadNorms(norms.q_weight.double(), norms.k_weight.double(), norms.eps)
    position_R = torch.tensor([max(length - 1, 0) for length in seq_lens], device=qkv_RC.device)
    query, key, value = rotate_heads(qkv_RC.double(), position_R, cos_sin_PD.double(), num_heads, num_kv_heads, norms)
    output = torch.zeros_like(query)
    for row, length in enumerate(seq_lens):
        if length == 0:
            continue
        keys = read_sequence(key_cache, block_tables[row], length - 1)
        values = read_sequence(value_cache, block_tables[row], length - 1)
        keys, values = torch.cat((keys, key[row][None])), torch.cat((values, value[row][None]))
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            output[row, head] = attend_token(query[row, head], keys[:, kv_head], values[:, kv_head], length - 1, scale)
    return output, torch.stack((key, value), dim=2)
