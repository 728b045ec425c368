"""Rotation of queries and keys of transformers' modules in one launch: their own code takes eight to fourteen.

T tokens, H query heads, K KV heads, D head size, C = D or D / 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tandem.kernels.products import product_trials
from tandem.kernels.products.fused_ops import is_fused, rotate_halves

NAME = "apply_rotary_pos_emb"  # what attention's code calls, in all architectures that have it
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # their own rounds three times; guesses
Rotated = tuple[torch.Tensor, torch.Tensor]


class FusedRotation:
    """What an architecture's own function computes, where it rotates halves; else, or where our kernels don't serve,
    that function does. When first asked for heads and angles of a size, ours is tried beside it."""

    def __init__(self, own: Callable[..., Rotated]) -> None:
        self._own = own
        self._is_right: dict[tuple[Any, ...], bool] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **more: Any
    ) -> Rotated:
        """The new q [1, H, T, D] and k [1, K, T, D], by cos and sin [1, T, C]."""
        size, width = q.shape[-1], cos.shape[-1]
        is_usual = not others and not more and q.dim() == 4 and len(q) == 1 and cos.dim() == 3 and q.dtype == k.dtype
        if not is_usual or not is_fused(q) or width not in (size, size // 2) or not q.stride(3) == k.stride(3) == 1:
            return self._own(q, k, cos, sin, *others, **more)
        kind = q.shape[1], k.shape[1], size, width, q.dtype, cos.dtype
        if kind not in self._is_right:
            self._is_right[kind] = self._tried(q, k, cos, sin)
        return rotated(q, k, cos, sin) if self._is_right[kind] else self._own(q, k, cos, sin)

    def _tried(self, *given: torch.Tensor) -> bool:
        def both(rotate: Callable[..., Rotated]) -> torch.Tensor:
            return torch.cat([each.flatten() for each in rotate(*given)])

        ours, own = partial(both, rotated), partial(both, self._own)
        return product_trials.passes("a rotation by halves", ours, own, TOLERANCE[given[0].dtype])


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    """The same by halves: views, in the shapes of q and k, of tokens one after another."""
    query, key = rotate_halves(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


def fuse_rotations(model: nn.Module) -> int:
    """Has attention modules' own code call ours in place of the function that it knows by that name: each has a copy
    of that code, since the module that it is from is others', too. Returns how many."""
    made: dict[Any, FunctionType] = {}
    count = 0
    for module in model.modules():
        own = inspect.unwrap(type(module).forward)
        is_changed = "forward" in vars(module)
        if is_changed or not isinstance(own, FunctionType) or NAME not in own.__code__.co_names:
            continue
        if own not in made:
            names = {**own.__globals__, NAME: FusedRotation(own.__globals__[NAME])}
            made[own] = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
            made[own].__kwdefaults__ = own.__kwdefaults__
        module.forward = MethodType(made[own], module)
        count += 1
    return count
