"""Matrices of all experts of a layer in 8 bits, and how an expert's come into them.

X experts, N outputs, K inputs, G groups of inputs with a scale each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.products.quantised_weight import FP8, QuantisedWeight


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """[X, N, K]: values * scales. `values` e4m3 [X, N, K], `scales` fp32 [X, G, N] contiguous. `group`: inputs that
    share a scale (the last group may have fewer); 0: all of them, G is 1."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def rows(self, expert: int, start: int, stop: int) -> QuantisedWeight:
        """Outputs `start` to `stop` of an expert, a view."""
        scales_GN = self.scales[expert, :, start:stop]
        return QuantisedWeight(self.values[expert, start:stop], scales_GN, None, self.group)

    def dequantised(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] of an expert, rounded once."""
        return self.rows(expert, 0, self.shape[1]).dequantised(dtype)


def empty_stacked(
    num_experts: int, num_outputs: int, num_inputs: int, group: int, device: torch.device | str
) -> StackedWeight:
    groups = -(-num_inputs // group) if group else 1
    values = torch.empty((num_experts, num_outputs, num_inputs), dtype=FP8, device=device)
    scales = torch.empty((num_experts, groups, num_outputs), dtype=torch.float32, device=device)
    return StackedWeight(values, scales, group)


def expert_matrix(weight: torch.Tensor | StackedWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of an expert, in `dtype` where it is quantised."""
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.dequantised(expert, dtype)
