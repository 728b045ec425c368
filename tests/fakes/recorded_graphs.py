"""Graphs on a CPU: what torch computes between `capture_begin` and `capture_end` is written down, and a replay computes
it again, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.kernels.api import unified_attention
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.metadata import AttentionMetadata


class Recorder(TorchDispatchMode):
    """A context manager around captures. `graph` makes the graphs that are captured in it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Callable, Sequence, Mapping, Any]] | None = None
        self.num_graphs = 0

    def graph(self) -> RecordedGraph:
        self.num_graphs += 1
        return RecordedGraph(self)

    def call(self, func: Callable, *args: Any) -> Any:
        """Calls `func`, which is written down as a whole, if something is."""
        with self._silent():
            result = func(*args)
        if self.taken is not None:
            self.taken.append((func, args, {}, result))
        return result

    @contextmanager
    def _silent(self) -> Iterator[None]:
        taken, self.taken = self.taken, None
        try:
            yield
        finally:
            self.taken = taken

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
    """Implements `Graph` of engine/running/graphs/prompt_graphs.py."""

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


class NativeCaptured:
    """Implements CapturedAttention of kernels/api/backend.py: at each replay, over the step that was filled in last."""

    def __init__(self, recorder: Recorder, most_rows: int) -> None:
        self.most_rows, self._recorder, self._metadata = most_rows, recorder, None
        self.num_filled = 0

    def takes(self, metadata: AttentionMetadata) -> bool:
        return metadata.num_decode_rows <= self.most_rows

    def fill(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self.num_filled += 1

    def begin(self) -> None: ...

    def attend(
        self, layer: Attention, query_GHD: torch.Tensor, key_GKD: torch.Tensor, value_GKD: torch.Tensor,
        meta: AttentionMetadata, kv_is_stored: bool,
    ) -> torch.Tensor:  # fmt: skip
        return self._recorder.call(self._attend, layer, query_GHD, key_GKD, value_GKD, kv_is_stored)

    def _attend(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_is_stored: bool
    ) -> torch.Tensor:
        out = torch.zeros(query.shape)
        if self._metadata is not None:
            of_step = slice(self._metadata.num_tokens)
            tensors = query[of_step], key[of_step], value[of_step]
            out[of_step] = layer.forward(*tensors, layer.kv_cache[0], self._metadata, kv_is_stored=kv_is_stored)
        return out
