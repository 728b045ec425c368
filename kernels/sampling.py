"""Tokens from logits: temperature, top_k, top_p, min_p and counter-based Gumbel noise, three launches without a sort.

R rows, V vocabulary. The definition, which every device computes alike (kernels/reference.py spells it out): of the
tokens in falling order of their logits, the lower id first among equals, the first `top_k` are kept; of these the
fewest whose probability reaches `top_p`; of these the tokens with at least `min_p` times the largest probability. The
token is the one with the largest logit / temperature + Gumbel noise; the noise is a pure function of (seed,
sample_index, output_index, token id). Probabilities are summed in fp32 and float64 on a GPU, so a token on the very
edge of `top_p` may be kept there and dropped elsewhere.
"""

from __future__ import annotations

import torch

from tandem.kernels import reference
from tandem.kernels.fused_ops import is_fused


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
    """int64 [R]. Logits of any float dtype with contiguous rows, read only; temperature (0: the most likely token),
    top_p and min_p fp32, the rest int64 (top_k 0: off; `seed_R` holds the bits of a u64).

    `filtered=False` promises that no row uses top_k, top_p or min_p and saves a launch. Nothing waits for the device,
    and a captured launch serves any settings. Raises ValueError for shapes, dtypes or strides that don't fit.
    """
    settings = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, sample_index_R, output_index_R)
    out = _checked(logits_RV, settings, out_R)
    if logits_RV.shape[0] == 0:
        return out
    if is_fused(logits_RV):
        from tandem.kernels.triton_kernels.sampling import sample_triton

        sample_triton(logits_RV, *settings, out, filtered)
        return out
    return out.copy_(reference.sample_tokens(logits_RV, *settings))


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
