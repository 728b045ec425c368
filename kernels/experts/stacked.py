"""Matrices of all experts of a layer in 8 or 4 bits, and how an expert's come into them.

X experts, N outputs, K inputs, G groups of inputs with a scale each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.products.quantised_weight import FP8, QuantisedWeight, packed, unpacked

MX_GROUP = 32  # inputs that share an exponent (OCP Microscaling Formats 1.0)
MOST_EXPONENT = 128  # of a scale, stored with a bias of 127: kernels know scales up to 2


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """[X, N, K]: (values - zeros) * scales, as a QuantisedWeight each: `values` e4m3 [X, N, K], or of 4 bits uint8
    [X, N, K / 2]; `scales` of any float, and of 4 bits `zeros`, [X, G, N] contiguous. Without zeros 4 bits are e2m1,
    ordered likewise, and `scales` uint8 [X, N, G] contiguous: powers of two, as exponents that are by 127 too large
    (MXFP4). `group`: inputs that share a scale (the last group of 8 bits may have fewer); 0: all of them, G is 1.
    `bias` [X, N] contiguous is added to products."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int = 0
    bias: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def is_e2m1(self) -> bool:
        return self.bits == 4 and self.zeros is None

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, num_outputs, num_bytes = self.values.shape
        return num_experts, num_outputs, num_bytes * 8 // self.bits

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.values, self.scales, self.zeros) if each is not None)

    def rows(self, expert: int, start: int, stop: int) -> QuantisedWeight:
        """Outputs `start` to `stop` of an expert, a view; not of e2m1."""
        assert not self.is_e2m1, "no QuantisedWeight has powers of two"
        scales_GN = self.scales[expert, :, start:stop]
        zeros_GN = None if self.zeros is None else self.zeros[expert, :, start:stop]
        return QuantisedWeight(self.values[expert, start:stop], scales_GN, zeros_GN, self.group)

    def fill_e2m1(self, expert: int, codes_NK: torch.Tensor, exponents_NG: torch.Tensor, bias_N: torch.Tensor) -> None:
        """An expert becomes uint8 codes with the exponents of their groups. Raises ValueError as `stacked_mxfp4`."""
        assert self.is_e2m1, "others are filled by rows"
        assert self.bias is not None, "they have biases"
        made = stacked_mxfp4(codes_NK[None], exponents_NG[None])
        self.values[expert].copy_(made.values[0])
        self.scales[expert].copy_(made.scales[0])
        self.bias[expert].copy_(bias_N)

    def dequantised(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] of an expert, rounded once."""
        if not self.is_e2m1:
            return self.rows(expert, 0, self.shape[1]).dequantised(dtype)
        exponents_NG = self.scales[expert].int() - 127
        groups = e2m1(unpacked(self.values[expert])).unflatten(1, (-1, MX_GROUP))
        return torch.ldexp(groups, exponents_NG[:, :, None]).flatten(1).to(dtype)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of uint8 codes, each of a sign, two bits of exponent and one of mantissa. Without a table, which
    graphs could not bring from the host."""
    exponent, half = codes >> 1 & 3, codes & 1
    halves = torch.where(exponent == 0, half, (2 + half) << (exponent.clamp(min=1) - 1)).float()
    return torch.where(codes & 8 != 0, -halves, halves) / 2


def empty_stacked(
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    group: int,
    device: torch.device | str,
    int4_scales: torch.dtype | None = None,
) -> StackedWeight:
    """Room for matrices of 8 bits, or of integers of 4 with scales and zero points of a type."""
    groups = -(-num_inputs // group) if group else 1
    sizes = num_experts, groups, num_outputs
    if int4_scales is None:
        values = torch.empty((num_experts, num_outputs, num_inputs), dtype=FP8, device=device)
        return StackedWeight(values, torch.empty(sizes, dtype=torch.float32, device=device), group)
    values = torch.empty((num_experts, num_outputs, num_inputs // 2), dtype=torch.uint8, device=device)
    scales, zeros = (torch.empty(sizes, dtype=int4_scales, device=device) for _ in range(2))
    return StackedWeight(values, scales, group, None, zeros)


def empty_mxfp4(
    num_experts: int, num_outputs: int, num_inputs: int, bias_dtype: torch.dtype, device: torch.device | str
) -> StackedWeight:
    """Room for matrices of e2m1 with biases."""
    sizes = num_experts, num_outputs
    values = torch.empty((*sizes, num_inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((*sizes, num_inputs // MX_GROUP), dtype=torch.uint8, device=device)
    return StackedWeight(values, scales, MX_GROUP, torch.empty(sizes, dtype=bias_dtype, device=device))


def stacked_mxfp4(
    codes_XNK: torch.Tensor, exponents_XNG: torch.Tensor, bias_XN: torch.Tensor | None = None
) -> StackedWeight:
    """Matrices of uint8: e2m1 in the lower four bits, and the exponents of their groups. Raises ValueError for scales
    that the kernels don't know."""
    num_experts, num_outputs, num_inputs = codes_XNK.shape
    if exponents_XNG.shape != (num_experts, num_outputs, num_inputs // MX_GROUP):
        raise ValueError(f"{tuple(exponents_XNG.shape)} exponents for {tuple(codes_XNK.shape)} numbers")
    if exponents_XNG.amax() > MOST_EXPONENT:
        raise ValueError(f"a scale is 2^{int(exponents_XNG.amax()) - 127}, and only such up to 2 are supported")
    values = packed(codes_XNK.flatten(0, 1)).view(num_experts, num_outputs, num_inputs // 2)
    return StackedWeight(values, exponents_XNG.contiguous(), MX_GROUP, bias_XN)


def expert_matrix(weight: torch.Tensor | StackedWeight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of an expert, in `dtype` where it is quantised."""
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.dequantised(expert, dtype)
