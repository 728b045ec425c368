"""Which experts each token of a trial goes to: noted in one pass over a model, and repeated in others.

Where two experts' scores are close, a rounding decides between them. In 16 bits most tokens of a deep mixture go to
some other expert in two passes that add in another order, and what they come to says little of anything else.

T tokens, k experts of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_routes: ContextVar[Routes | None] = ContextVar("routes", default=None)


class Routes:
    """The experts and weights that each module of a mixture was given, for all tokens of the passes so far."""

    def __init__(self) -> None:
        self._noted: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._wanted_T: torch.Tensor | None = None  # None: passes are noted

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes where each token goes in the passes within."""
        yield from self._active(None)

    @contextmanager
    def repeating(self, index_T: torch.Tensor) -> Iterator[None]:
        """Has the tokens of the passes within go where those of these places (int64) went that were noted."""
        yield from self._active(index_T)

    def _active(self, index_T: torch.Tensor | None) -> Iterator[None]:
        self._wanted_T, token = index_T, _routes.set(self)
        try:
            yield
        finally:
            _routes.reset(token)

    def taken(self, module: Any, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a module is to take in place of the ids and weights that its router made: those, if none were noted."""
        if self._wanted_T is None:
            self._noted.setdefault(module, []).append((ids_Tk, weights_Tk))
            return ids_Tk, weights_Tk
        if module not in self._noted:
            return ids_Tk, weights_Tk
        ids, weights = (torch.cat(parts) for parts in zip(*self._noted[module], strict=True))
        return ids[self._wanted_T].to(ids_Tk.dtype), weights[self._wanted_T].to(weights_Tk.dtype)


def routed(module: Any, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts and weights of a module's tokens: the router's, but in a trial's passes."""
    routes = _routes.get()
    return (ids_Tk, weights_Tk) if routes is None else routes.taken(module, ids_Tk, weights_Tk)
