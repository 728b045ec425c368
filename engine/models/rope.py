"""Rotary position embedding: inverse frequencies of each supported scaling, and their application.

Same formulas as transformers computes (modeling_rope_utils); sources: RoFormer (arXiv 2104.09864), linear position
interpolation (2306.15595), Llama 3.1's piecewise scaling, YaRN (2309.00071).
Legend: T tokens, H heads, D head_dim, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tandem.engine.contracts.rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies fp32 [F] in radians a position, factor on cos and sin)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return base / config.factor, 1.0
    if config.rope_type == "llama3":
        return _llama3(base, config), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, head_dim)
    return base, 1.0


def _llama3(base_F: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    original = config.original_max_position_embeddings
    wavelength = 2 * math.pi / base_F
    longest, shortest = original / config.low_freq_factor, original / config.high_freq_factor
    scaled = torch.where(wavelength > longest, base_F / config.factor, base_F)
    smooth = (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = ~(wavelength < shortest) * ~(wavelength > longest)
    return torch.where(between, smoothed, scaled)


def _yarn(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """NTK-by-parts interpolation and the attention temperature that goes with it."""

    def dimension_of(rotations: float) -> float:
        span = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(config.theta))

    def temperature(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    factor = config.attention_factor
    if factor is None:
        if config.mscale and config.mscale_all_dim:
            factor = temperature(config.factor, config.mscale) / temperature(config.factor, config.mscale_all_dim)
        else:
            factor = temperature(config.factor)
    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    positions = config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * positions) * (1 - keep) + 1.0 / positions * keep, factor


class RotaryEmbedding(nn.Module):
    """cos and sin of every position, in one table that all layers and steps share."""

    inverse_F: torch.Tensor

    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int) -> None:
        super().__init__()
        inverse, self.factor = inverse_frequencies(config, head_dim)
        self.register_buffer("inverse_F", inverse, persistent=False)
        self._num_positions = num_positions
        self._table_PD: torch.Tensor | None = None

    def table(self) -> torch.Tensor:
        """fp32 [P, D]: cos, then sin of the D / 2 angles of each position. Made on first use."""
        if self._table_PD is None:
            positions_P = torch.arange(self._num_positions, device=self.inverse_F.device)
            angles_PF = positions_P[:, None].float() * self.inverse_F.float()
            self._table_PD = torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1) * self.factor
        return self._table_PD
