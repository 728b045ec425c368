"""Counts Triton kernels that are made ready to run (compiled or loaded): after warm-up there should be none."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)


class CompilationCounter:
    """Counts from its creation on, in the whole process. `warn_from_now`: each further one is logged by name and
    shows in `num_late`. Without a GPU no kernel is made, and Triton isn't imported for it."""

    def __init__(self) -> None:
        self.num_total = 0
        self.num_late = 0
        self._late = False
        if torch.cuda.is_available() and find_spec("triton") is not None:
            from triton import knobs

            self._next = knobs.runtime.jit_cache_hook
            knobs.runtime.jit_cache_hook = self._count

    def warn_from_now(self) -> None:
        self._late = True

    def _count(self, **info: Any) -> bool | None:
        self.num_total += 1
        if self._late:
            self.num_late += 1
            logger.warning("a kernel was compiled while serving: %s", info.get("repr", ""))
        return self._next(**info) if self._next is not None else None
