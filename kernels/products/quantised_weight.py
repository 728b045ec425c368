"""A weight of 8 or 4 bits with its scales, in the one layout that products read, and how numbers come into it.

N outputs, K inputs, G groups of inputs with a scale each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT4_HALF = 8  # what is stored for 0 where a format has no zero points
LANE_INPUTS = 32  # that four of the tensor cores' lanes share out among them


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A matrix [N, K], (stored - zero) * scale. `values`: e4m3 [N, K], or of 4 bits uint8 [N, K / 2] as `packed` makes
    it. `scales` [G, N] of any float; `zeros` [G, N] in the same type, of 4 bits only. `group`: inputs that share a
    scale (the last group may have fewer); 0: all of them, G is 1."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int = 0
    shape: tuple[int, int] = field(init=False)  # (N, K); every product asks for it

    def __post_init__(self) -> None:
        shape = self.values.shape[0], self.values.shape[1] * (1 if self.zeros is None else 2)
        object.__setattr__(self, "shape", shape)

    @property
    def bits(self) -> int:
        return 8 if self.zeros is None else 4

    @property
    def words(self) -> torch.Tensor:
        """What kernels read: e4m3 [N, K], or int32 [N, K / 8]."""
        return self.values if self.zeros is None else self.values.view(torch.int32)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def rows(self, start: int, stop: int) -> QuantisedWeight:
        """Outputs `start` to `stop`, a view."""
        zeros = None if self.zeros is None else self.zeros[:, start:stop]
        return replace(self, values=self.values[start:stop], scales=self.scales[:, start:stop], zeros=zeros)

    def columns(self, start: int, stop: int) -> QuantisedWeight:
        """Inputs `start` to `stop`. Raises ValueError where they cut a group, or lanes' numbers, apart."""
        step = max(self.group, 1) if self.zeros is None else max(self.group, LANE_INPUTS)
        if start % step or (stop % step and stop != self.shape[1]):
            raise ValueError(f"inputs {start} to {stop} cut groups of {step} apart")
        per = 1 if self.zeros is None else 2
        values = self.values[:, start // per : stop // per]
        if not self.group:
            return replace(self, values=values)
        groups = slice(start // self.group, -(-stop // self.group))
        zeros = None if self.zeros is None else self.zeros[groups]
        return replace(self, values=values, scales=self.scales[groups], zeros=zeros)

    def copy_(self, other: QuantisedWeight) -> None:
        """Takes the numbers of another one of the same shape and groups."""
        assert (self.shape, self.group) == (other.shape, other.group), f"{self.shape} of {self.group}: {other.shape}"
        for own, theirs in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(theirs)

    def reordered(self, order_N: torch.Tensor) -> QuantisedWeight:
        """The outputs in another order: int64 [N]."""
        zeros = None if self.zeros is None else self.zeros[:, order_N]
        return replace(self, values=_as_bytes(self.values)[order_N].view(self.values.dtype),
                       scales=self.scales[:, order_N], zeros=zeros)  # fmt: skip

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] in `dtype`, rounded once."""
        stored = self.values.float() if self.zeros is None else unpacked(self.values).float()
        if not self.group:
            zero = 0.0 if self.zeros is None else self.zeros.float().t()
            return ((stored - zero) * self.scales.float().t()).to(dtype)
        inputs = torch.arange(stored.shape[1], device=stored.device) // self.group
        if self.zeros is not None:
            stored -= self.zeros.float().t()[:, inputs]
        return (stored * self.scales.float().t()[:, inputs]).to(dtype)

    def to(self, device: torch.device) -> QuantisedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values, self.scales) if self.zeros is None else (self.values, self.scales, self.zeros)


def empty_fp8(num_outputs: int, num_inputs: int, group: int, device: torch.device | str) -> QuantisedWeight:
    groups = -(-num_inputs // group) if group else 1
    scales = torch.empty((groups, num_outputs), dtype=torch.float32, device=device)
    return QuantisedWeight(torch.empty((num_outputs, num_inputs), dtype=FP8, device=device), scales, None, group)


def empty_int4(
    num_outputs: int, num_inputs: int, group: int, scale_dtype: torch.dtype, device: torch.device | str
) -> QuantisedWeight:
    groups = -(-num_inputs // group) if group else 1
    pairs = torch.empty((num_outputs, num_inputs // 2), dtype=torch.uint8, device=device)
    scales, zeros = (torch.empty((groups, num_outputs), dtype=scale_dtype, device=device) for _ in range(2))
    return QuantisedWeight(pairs, scales, zeros, group)


def quantise_fp8(weight_NK: torch.Tensor, group: int = 0) -> QuantisedWeight:
    """The weight in e4m3, a scale an output, or for each group of its inputs: the largest number becomes the
    format's."""
    if group:
        parts = [quantise_fp8(part_NK) for part_NK in weight_NK.split(group, 1)]
        values = torch.cat([_as_bytes(part.values) for part in parts], 1).view(FP8)
        return QuantisedWeight(values, torch.cat([part.scales for part in parts]), None, group)
    scale_N = (weight_NK.abs().amax(1).float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    values = (weight_NK.float() / scale_N[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantisedWeight(values, scale_N[None, :])


def quantise_int4(weight_NK: torch.Tensor, group: int, scale_dtype: torch.dtype) -> QuantisedWeight:
    """The weight in 4 bits, symmetric around 0: the largest number of each group becomes 7 or -7."""
    num_outputs, num_inputs = weight_NK.shape
    groups = weight_NK.float().view(num_outputs, -1, group or num_inputs)
    scale_NG = (groups.abs().amax(2) / (INT4_HALF - 1)).clamp_min(torch.finfo(torch.float16).tiny).to(scale_dtype)
    stored = (groups / scale_NG.float()[:, :, None]).round_().clamp_(-INT4_HALF, INT4_HALF - 1) + INT4_HALF
    zeros = torch.full_like(scale_NG.t(), INT4_HALF, memory_format=torch.contiguous_format)
    scales = torch.empty_like(zeros).copy_(scale_NG.t())  # of one group, too, with strides of its own
    return QuantisedWeight(packed(stored.to(torch.uint8).view(num_outputs, num_inputs)), scales, zeros, group)


def packed(stored_NK: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0 to 15 -> uint8 [N, K / 2], K a multiple of 32. Byte 16 b + 4 t + 2 p + s holds inputs
    32 b + 16 s + 8 h + 2 t + p, the lower half that of h = 0: a lane of the tensor cores finds its own in one word, the
    pairs that it multiplies at once in the same places of the word's halves."""
    num_outputs, num_inputs = stored_NK.shape
    by_place = stored_NK.view(num_outputs, num_inputs // LANE_INPUTS, 2, 2, 4, 2).permute(0, 1, 4, 5, 2, 3)
    pairs = by_place.reshape(num_outputs, num_inputs // 2, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """What `packed` was given."""
    num_outputs, num_inputs = pairs.shape[0], pairs.shape[1] * 2
    stored = torch.stack((pairs & 15, pairs >> 4), 2).view(num_outputs, num_inputs // LANE_INPUTS, 4, 2, 2, 2)
    return stored.permute(0, 1, 4, 5, 2, 3).reshape(num_outputs, num_inputs)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Indexing knows no fp8 on every device."""
    return values.view(torch.uint8) if values.dtype == FP8 else values
