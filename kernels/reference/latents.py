"""Eager twins of the kernels around attention over latents, written for reading.

T tokens, H heads, N elements of a head's key without a position, P rotated ones, D = N + P, L latent size.
"""

from __future__ import annotations

import torch


def rotated(
    part_TXP: torch.Tensor, position_T: torch.Tensor, cos_sin_CP: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """[T, X, P]: each element where it was. Computed in fp32, or as wide as it comes, and rounded once."""
    wide = part_TXP.to(torch.promote_types(part_TXP.dtype, torch.float32))
    cos, sin = (half[:, None] for half in cos_sin_CP[position_T].chunk(2, dim=-1))
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return both.to(part_TXP.dtype)


def rotated_queries(
    query_THD: torch.Tensor, position_T: torch.Tensor, cos_sin_CP: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """[T, H, D], the last P elements of each head rotated."""
    start = query_THD.shape[2] - cos_sin_CP.shape[1]
    return torch.cat(
        (query_THD[..., :start], rotated(query_THD[..., start:], position_T, cos_sin_CP, interleaved)), dim=-1
    )


def finished_rows(
    row_TR: torch.Tensor,
    gain_L: torch.Tensor,
    eps: float,
    position_T: torch.Tensor,
    cos_sin_CP: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """[T, L + P] as rows are stored: the latent normalised, the rest rotated."""
    latent_TL, shared_TP = row_TR.split((len(gain_L), row_TR.shape[1] - len(gain_L)), dim=1)
    wide = latent_TL.to(torch.promote_types(latent_TL.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    turned = rotated(shared_TP[:, None], position_T, cos_sin_CP, interleaved)[:, 0]
    return torch.cat((gain_L * normed.to(row_TR.dtype), turned), dim=1)


def absorbed(query_THD: torch.Tensor, key_HNL: torch.Tensor) -> torch.Tensor:
    """[T, H, L + P] of rotated queries."""
    key_width = key_HNL.shape[1]
    query_HTL = torch.bmm(query_THD[..., :key_width].transpose(0, 1), key_HNL)
    return torch.cat((query_HTL.transpose(0, 1), query_THD[..., key_width:]), dim=-1)


def values(summed_THL: torch.Tensor, value_HVL: torch.Tensor) -> torch.Tensor:
    """[T, H, V]."""
    return torch.bmm(summed_THL.transpose(0, 1), value_HVL.transpose(1, 2)).transpose(0, 1)
