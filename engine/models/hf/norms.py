"""RMS norms of transformers' modules in one launch: their own code takes five to seven.

E features of a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tandem.kernels.products import product_trials
from tandem.kernels.products.fused_ops import is_fused, rms_norm

# Of the norm of the difference: each rounds once or twice, by 2e-3 in bf16. Guesses.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


class FusedNorm:
    """What such a module computes. Where our kernels don't serve, its own code does."""

    def __init__(self, module: Any, gain_E: torch.Tensor, eps: float) -> None:
        self._own_forward, self._gain_E, self._eps = module.forward, gain_E, eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not is_fused(hidden_states):
            own: torch.Tensor = self._own_forward(hidden_states)
            return own
        return normed(hidden_states, self._gain_E, self._eps)


class _Norm(NamedTuple):
    module: Any
    weight_E: torch.Tensor
    eps: float


def normed(x: torch.Tensor, gain_E: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x [..., E], in its shape and dtype."""
    return rms_norm(x.reshape(-1, len(gain_E)), gain_E, eps).to(x.dtype).view(x.shape)


def fuse_norms(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Replaces, in place, the forward of each module that is found to compute an RMS norm, with its weight as the gain
    or one more than that (Gemma). Returns of how many. `dtype`: of hidden states."""
    found: dict[tuple[type, int, float], int | None] = {}
    count = 0
    for norm in _norms(model):
        kind = type(norm.module), len(norm.weight_E), norm.eps
        if kind not in found:
            found[kind] = next((more for more in (0, 1) if _is_right(norm, more, device, dtype)), None)
        more = found[kind]
        if more is not None:
            norm.module.forward = FusedNorm(norm.module, _gain(norm, more), norm.eps)
            count += 1
    return count


def _norms(model: nn.Module) -> Iterator[_Norm]:
    """Modules that look like RMS norms."""
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or len(inspect.signature(module.forward).parameters) != 1:
            continue
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(weight, torch.Tensor) and weight.dim() == 1 and isinstance(eps, float):
            yield _Norm(module, weight, eps)


def _gain(norm: _Norm, more: int) -> torch.Tensor:
    return norm.weight_E.float() + more if more else norm.weight_E


def _is_right(norm: _Norm, more: int, device: torch.device, dtype: torch.dtype) -> bool:
    x = product_trials.random_matrix(8, len(norm.weight_E), dtype, device, 5)
    x[4:] *= 0.02  # so small that epsilon counts
    ours = normed(x, _gain(norm, more), norm.eps)
    return product_trials.relative_error(ours, norm.module.forward(x)) <= TOLERANCE[dtype]
