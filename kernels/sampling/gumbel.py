"""Counter-based Gumbel noise: a pure function of (seed, sample_index, output_index, token id).

Nothing is carried from step to step, so a token comes out the same on any node, in any batch and in any attempt.

Algorithm. `mix` is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014, with David Stafford's "Mix13" constants). All arithmetic is modulo 2^64, held in int64:

    key  = mix(mix(mix(seed + G) + G * (sample_index + 1)) + G * (output_index + 1))
    bits = mix(key + G * (token_id + 1))         the token_id-th output of the SplitMix64 generator seeded with key
    u    = (bits >> 12 + 0.5) / 2^52             in [2^-53, 1 - 2^-53], exact in float64: never 0, never 1
    g    = -log(-log(u))                         in [-3.61, 36.74]: never infinite, never NaN

`u` is bit-identical on every device; `g` may differ in its last bit where a device's float64 log does.

Shape legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # odd part of 2^64 / golden ratio, as the int64 of the same bits
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def row_keys(seed_N: torch.Tensor, sample_index_N: torch.Tensor, output_index_N: torch.Tensor) -> torch.Tensor:
    """Generator key of each row, int64 [N]. All arguments int64 [N]; `seed_N` holds the bits of a u64."""
    key_N = _mix_(seed_N + _GAMMA)
    key_N = _mix_(key_N + (sample_index_N + 1) * _GAMMA)
    return _mix_(key_N + (output_index_N + 1) * _GAMMA)


def random_bits(key_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 [N, V]: 64 random bits for each row and token id."""
    offset_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=key_N.device) * _GAMMA
    return _mix_(key_N[:, None] + offset_V[None, :])


def gumbel_noise(key_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float64 [N, V], finite everywhere."""
    bits_NV = _shift_right_(random_bits(key_N, vocab_size), 12)
    uniform_NV = bits_NV.to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform_NV.log_().neg_().log_().neg_()


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser in place, a bijection on 64-bit words."""
    z ^= _shift_right_(z.clone(), 30)
    z *= _MIX_1
    z ^= _shift_right_(z.clone(), 27)
    z *= _MIX_2
    z ^= _shift_right_(z.clone(), 31)
    return z


def _shift_right_(z: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical right shift in place: torch shifts int64 arithmetically, so the copied sign bits are cleared."""
    return z.bitwise_right_shift_(num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
