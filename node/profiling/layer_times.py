"""The time of a model's layers and of the attention in them, taken around their calls while somebody watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from tandem.engine.contracts.wire.profile import Timed

METHODS = ("forward", "forward_few_rows")  # by which models call a layer
Mark = float | torch.cuda.Event


class LayerTimes:
    """From `watch` until `unwatch` every call of a layer is timed: by events on a GPU's stream, by the clock on a CPU.
    Both belong to the thread that runs the model; the totals are any thread's after that."""

    def __init__(self, model: nn.Module, attention: Mapping[str, nn.Module], device: torch.device) -> None:
        self._layers, self._attention = _outermost_lists(model), dict(attention)
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[tuple[Mark, Mark]]] = {}
        self._restore: list[Callable[[], None]] = []

    def watch(self) -> None:
        for name, module in {**self._layers, **self._attention}.items():
            for method in METHODS:
                if hasattr(module, method):
                    self._wrap(name, module, method)

    def unwatch(self) -> None:
        """Leaves every layer as it was. Idempotent."""
        while self._restore:
            self._restore.pop()()

    def totals(self) -> tuple[tuple[Timed, ...], tuple[Timed, ...]]:
        """(layers, attention), each in the model's order. Waits for the device."""
        return self._totals(self._layers), self._totals(self._attention)

    def _totals(self, names: Mapping[str, nn.Module]) -> tuple[Timed, ...]:
        marks = {name: self._marks[name] for name in names if name in self._marks}
        return tuple(
            Timed(name, len(calls), sum(_ms_between(*call) for call in calls)) for name, calls in marks.items()
        )

    def _wrap(self, name: str, module: nn.Module, method: str) -> None:
        call, before = getattr(module, method), vars(module).get(method)

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                begin = self._mark()
                result = call(*args, **kwargs)
                self._marks.setdefault(name, []).append((begin, self._mark()))
            return result

        setattr(module, method, timed)
        if before is None:
            self._restore.append(lambda: delattr(module, method))
        else:
            self._restore.append(lambda: setattr(module, method, before))

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _outermost_lists(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of each list that is in no other list: a model's layers, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{layer}.") for layer in found)
        if isinstance(module, nn.ModuleList) and not is_inside:
            found |= {f"{name}.{index}": layer for index, layer in enumerate(module)}
    return found


def _ms_between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end)
    assert not isinstance(end, torch.cuda.Event)
    return (end - begin) * 1e3
