"""Tokens from logits: temperature, top_k, top_p, min_p and counter-based Gumbel noise; on a GPU without a sort.

R rows, V vocabulary, M rows that are drawn. The definition, which every device computes alike
(kernels/reference/paged.py spells it out): of the tokens in falling order of their logits, the lower id first among
equals, the first `top_k` are kept; of these the fewest whose probability reaches `top_p`; of these the tokens with at
least `min_p` times the largest probability. The token is the one with the largest logit / temperature + Gumbel noise;
the noise (gumbel.py) is a pure function of (seed, sample_index, output_index, token id). Probabilities are summed in
fp32 and float64 on a GPU, so a token on the very edge of `top_p` may be kept there and dropped elsewhere.
"""

from __future__ import annotations

import torch

from tandem.kernels.products.fused_ops import is_fused
from tandem.kernels.sampling.gumbel import gumbel_noise, row_keys


def sample_tokens(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    output_index_R: torch.Tensor,
    out_R: torch.Tensor | None = None,
    *,
    filtered: bool = True,
) -> torch.Tensor:
    """One token a row, int64 [R]. Logits of any float dtype with contiguous rows, read only; temperature (0: the most
    likely token), top_p and min_p fp32, the rest int64 (top_k 0: off; `seed_R` holds the bits of a u64).

    `filtered=False` promises that no row uses top_k, top_p or min_p and saves their work. Nothing waits for the device,
    and captured launches serve any settings. Raises ValueError for shapes, dtypes or strides that don't fit.
    """
    settings = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, sample_index_R, output_index_R)
    out = _checked(logits_RV, settings, out_R)
    if logits_RV.shape[0] == 0:
        return out
    if is_fused(logits_RV):
        from tandem.kernels.triton_kernels.sampling.sampling import sample_triton

        sample_triton(logits_RV, *settings, out, filtered)
        return out
    return out.copy_(_sample_eagerly(logits_RV.float(), *settings, filtered))


_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.int64, torch.int64)


def _checked(logits_RV: torch.Tensor, settings: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> torch.Tensor:
    if logits_RV.dim() != 2 or logits_RV.shape[1] == 0 or logits_RV.stride(1) != 1:
        raise ValueError(f"logits must be [rows, vocabulary] with contiguous rows, got {tuple(logits_RV.shape)}")
    rows = logits_RV.shape[0]
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    for tensor, dtype in zip((*settings, out), (*_DTYPES, torch.int64), strict=True):
        if tensor.shape != (rows,) or tensor.dtype != dtype or not tensor.is_contiguous():
            got = f"{tensor.dtype} {tensor.shape}"
            raise ValueError(f"settings and tokens must be contiguous {dtype} [{rows}], got {got}")
    return out


def _sample_eagerly(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    output_index_R: torch.Tensor,
    filtered: bool,
) -> torch.Tensor:
    """What `sample_tokens` does, with a sort and fp32 logits."""
    greedy_R = logits_RV.argmax(dim=-1)
    is_drawn_R = temperature_R > 0
    if logits_RV.device.type == "cpu":
        row_M = is_drawn_R.nonzero()[:, 0]
    else:  # counting them would wait
        row_M = torch.arange(len(logits_RV), device=logits_RV.device)
    logits_MV = logits_RV.index_select(0, row_M)
    scaled_MV = logits_MV / torch.where(is_drawn_R, temperature_R, 1.0)[row_M, None]
    if filtered:
        scaled_MV = _keep(logits_MV, scaled_MV, top_k_R[row_M], top_p_R[row_M], min_p_R[row_M])
    key_M = row_keys(seed_R[row_M], sample_index_R[row_M], output_index_R[row_M])
    drawn_M = gumbel_noise(key_M, logits_MV.shape[1]).add_(scaled_MV).argmax(dim=-1)
    return torch.where(is_drawn_R, greedy_R.index_copy(0, row_M, drawn_M), greedy_R)


def _keep(
    logits_MV: torch.Tensor,
    scaled_MV: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
    min_p_M: torch.Tensor,
) -> torch.Tensor:
    """`scaled_MV`, -inf where top_k (0: all), top_p or min_p ban the token. Sums run in float64 so that the kept set
    doesn't depend on the order of additions."""
    order_MV = logits_MV.argsort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    dropped_MV = (place_V >= top_k_M[:, None]) & (top_k_M > 0)[:, None]
    sorted_MV = scaled_MV.gather(1, order_MV).masked_fill(dropped_MV, float("-inf"))
    probability_MV = sorted_MV.to(torch.float64).softmax(dim=-1)
    before_MV = probability_MV.cumsum(dim=-1) - probability_MV
    dropped_MV |= (before_MV >= top_p_M[:, None]) & (top_p_M < 1.0)[:, None] & (place_V > 0)
    banned_MV = torch.zeros_like(dropped_MV).scatter_(1, order_MV, dropped_MV)
    # p >= min_p * p_max, in logarithms; min_p 0 gives a threshold of -inf and keeps all.
    threshold_M1 = scaled_MV.amax(dim=-1, keepdim=True) + min_p_M[:, None].double().log().float()
    return scaled_MV.masked_fill(banned_MV | (scaled_MV < threshold_M1), float("-inf"))
