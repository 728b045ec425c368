"""Weights for benchmarks: a hash of each element's index, so every device, process and start makes the same ones."""

from __future__ import annotations

import hashlib
import math

import torch

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}  # elements hashed at once: what fits a CPU's cache, or some 256 MiB


def fill_with_noise(name: str, parameter: torch.Tensor) -> None:
    """Norms 1, biases 0, matrices [..., out, in] uniform with variance 1 / in: activations keep their size."""
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        _fill_uniform(parameter.view(-1), name, math.sqrt(3.0 / parameter.shape[-1]))


def _fill_uniform(flat_N: torch.Tensor, name: str, bound: float) -> None:
    """Element i becomes hash(name, i), uniform in [-bound, bound)."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    chunk = CHUNK.get(flat_N.device.type, 1 << 18)
    for start in range(0, flat_N.numel(), chunk):
        part = flat_N[start : start + chunk]
        words = torch.arange(part.numel(), dtype=torch.int32, device=part.device)
        words += _signed(key + start)
        part.copy_(_mixed(words).float().mul_(bound / 2**31))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, in place on int32 (products wrap, shifts are made logical by a mask)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words ^= (words >> shift) & ((1 << (32 - shift)) - 1)
        words *= _signed(factor)
    return words


def _signed(value: int) -> int:
    """The low 32 bits as two's complement."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
