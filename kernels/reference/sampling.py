"""Eager twins of drawing tokens from logits, in float64. Tests compare against these.

R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math

import torch


def sample_tokens(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    output_index_R: torch.Tensor,
) -> torch.Tensor:
    """Twin of `sampling.sample_tokens`, row by row, probabilities in float64 -> int64 [R]."""
    tokens = []
    columns = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, sample_index_R, output_index_R)
    for logits_V, *settings in zip(logits_RV.float(), *(column.tolist() for column in columns), strict=True):
        temperature, top_k, top_p, min_p, seed, sample_index, output_index = settings
        if temperature == 0.0:
            tokens.append(int(logits_V.argmax()))
            continue
        scaled_V = logits_V / torch.full_like(logits_V, temperature)  # by a number, a GPU multiplies with 1 / number
        kept_V = kept_tokens(logits_V, scaled_V, top_k, top_p, min_p)
        noise_V = gumbel_noise(seed, sample_index, output_index, len(logits_V)).to(logits_V.device)
        tokens.append(int((scaled_V.double() + noise_V).masked_fill(~kept_V, float("-inf")).argmax()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device)


def kept_tokens(logits_V: torch.Tensor, scaled_V: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool [V]: which tokens top_k, then top_p, then min_p leave."""
    order_V = logits_V.sort(descending=True, stable=True).indices
    if top_k > 0:
        order_V = order_V[:top_k]
    if top_p < 1.0:
        probability = scaled_V[order_V].double().softmax(0)
        before = probability.cumsum(0) - probability
        before[0] = -1.0  # the best token stays, whatever top_p
        order_V = order_V[before < top_p]
    kept_V = torch.zeros_like(logits_V, dtype=torch.bool)
    kept_V[order_V] = True
    if min_p > 0.0:
        kept_V &= scaled_V >= scaled_V.max() + math.log(min_p)
    return kept_V


def gumbel_noise(seed: int, sample_index: int, output_index: int, vocab_size: int) -> torch.Tensor:
    """float64 [V]: -log(-log(u)), u from the top 52 of SplitMix64's bits, the generator keyed by all three numbers."""
    key = _split_mix(seed + _GAMMA)
    key = _split_mix(key + _GAMMA * (sample_index + 1))
    key = _split_mix(key + _GAMMA * (output_index + 1))
    counters = torch.arange(1, vocab_size + 1, dtype=torch.int64) * _as_int64(_GAMMA) + _as_int64(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        counters = (counters ^ ((counters >> shift) & ((1 << (64 - shift)) - 1))) * _as_int64(factor)
    uniform = (((counters >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _split_mix(z: int) -> int:
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        z &= _WORD
        z = ((z ^ (z >> shift)) * factor) & _WORD
    return z


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def ban_tokens(logits_NV: torch.Tensor, row_M: torch.Tensor, mask_MW: torch.Tensor) -> torch.Tensor:
    """Twin of `token_masks.ban_tokens`, token by token -> [N, V]."""
    masked_NV = logits_NV.clone()
    for row, words in zip(row_M.tolist(), mask_MW.tolist(), strict=True):
        for token in range(logits_NV.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                masked_NV[row, token] = float("-inf")
    return masked_NV
