"""Bans tokens of single rows, as bit masks say. M masked rows of N, W words of a mask, V vocabulary."""

from __future__ import annotations

import torch

from tandem.kernels.products.fused_ops import is_fused


def ban_tokens(logits_NV: torch.Tensor, row_M: torch.Tensor, mask_MW: torch.Tensor) -> None:
    """-inf, in place, for each token t of row `row_M[i]` (int64, each row once) where bit t % 32 of
    `mask_MW[i, t // 32]` (int32, contiguous) is 0. Logits of any float dtype with contiguous rows; the other rows are
    neither read nor written. Raises ValueError for masks that don't reach over the vocabulary."""
    if mask_MW.dim() != 2 or len(mask_MW) != len(row_M) or 32 * mask_MW.shape[1] < logits_NV.shape[1]:
        raise ValueError(f"masks {tuple(mask_MW.shape)} don't fit {len(row_M)} rows of {logits_NV.shape[1]} tokens")
    if is_fused(logits_NV):
        from tandem.kernels.triton_kernels.sampling.token_masks import ban_tokens_triton

        ban_tokens_triton(logits_NV, row_M, mask_MW)
        return
    bytes_MB = mask_MW.contiguous().view(torch.uint8)  # little-endian: byte b has the tokens 8 * b and on
    shifts = torch.arange(8, dtype=torch.uint8, device=mask_MW.device)
    is_banned_MV = ((bytes_MB[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, : logits_NV.shape[1]]
    logits_NV.index_copy_(0, row_M, logits_NV.index_select(0, row_M).masked_fill_(is_banned_MV, float("-inf")))
