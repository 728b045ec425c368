"""Graphs on a CPU: what torch computes between `capture_begin` and `capture_end` is written down, and a replay computes
it again, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.kernels.api import unified_attention


class Recorder(TorchDispatchMode):
    """A context manager around captures. `graph` makes the graphs that are captured in it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Callable, Sequence, Mapping, Any]] | None = None
        self.num_graphs = 0

    def graph(self) -> RecordedGraph:
        self.num_graphs += 1
        return RecordedGraph(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.tandem.unified_attention.default:  # it ends one graph and begins another
            with self:
                return unified_attention._unified_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.taken is not None:
            self.taken.append((func, args, kwargs, result))
        return result


class RecordedGraph:
    """Implements `Graph` of engine/running/prompt_graphs.py."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: list[tuple[Callable, Sequence, Mapping, Any]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self._recorder.taken is None, "one at a time"
        self._recorder.taken = self._calls

    def capture_end(self) -> None:
        assert self._recorder.taken is self._calls
        self._recorder.taken = None

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
