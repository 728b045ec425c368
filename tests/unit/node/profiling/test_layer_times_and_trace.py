"""What a profile is made of: timers that come and go around a model's layers, and figures read from a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from tandem.node.profiling.layer_times import LayerTimes
from tandem.node.profiling.trace import MOST_KERNELS, read_trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def forward_few_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.attention = nn.Identity()


def test_layers_are_timed_whichever_way_they_are_called_and_left_as_they_were() -> None:
    model, x = Model(), torch.zeros(2)
    replaced = lambda x: x + 3  # noqa: E731
    model.layers[1].forward = replaced
    before = [dict(vars(module)) for module in model.modules()]
    times = LayerTimes(model, {"attention.0": model.attention}, torch.device("cpu"))
    times.watch()
    assert model.layers[0](x).tolist() == [1, 1]
    assert model.layers[0].forward_few_rows(x).tolist() == [2, 2]  # type: ignore[operator]
    assert model.layers[1](x).tolist() == [3, 3]
    model.attention(x)
    times.unwatch()
    times.unwatch()
    model.layers[0](x)
    assert [dict(vars(module)) for module in model.modules()] == before
    layers, attention = times.totals()
    assert [(each.name, each.calls) for each in layers] == [("layers.0", 2), ("layers.1", 1)]
    assert [(each.name, each.calls) for each in attention] == [("attention.0", 1)]
    assert all(each.ms > 0 for each in (*layers, *attention))


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int | str = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": "any", "args": args}


def allocation(total: int, device: int = 0) -> dict[str, Any]:
    args = {"Total Allocated": total, "Device Type": device, "Bytes": -3, "finished": False}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1.5, "tid": 1, "args": args}


def trace(*events: dict[str, Any]) -> bytes:
    start = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}
    return json.dumps({"schemaVersion": 1, "traceEvents": [start, *events]}).encode()


def test_operators_of_a_cpu_without_what_they_call() -> None:
    figures = read_trace(
        trace(
            event("linear", 0, 100), event("mm", 10, 60), event("empty", 12, 5), event("add", 100, 40),
            event("mm", 20, 30, tid=2), allocation(5000), allocation(2000), allocation(9000, device=1),
        )
    )  # fmt: skip
    assert {each.name: (each.calls, each.ms) for each in figures.kernels} == {
        "linear": (1, pytest.approx(0.040)),
        "mm": (2, pytest.approx(0.085)),
        "add": (1, pytest.approx(0.040)),
        "empty": (1, pytest.approx(0.005)),
    }
    assert (figures.launches, figures.kernel_s, figures.peak_bytes) == (5, 0.0, 5000)
    assert figures.kernels[0].name == "mm", "what takes most comes first"


def test_kernels_of_a_gpu_and_the_time_in_which_it_had_any() -> None:
    figures = read_trace(
        trace(
            event("aten::mm", 0, 100), event("cudaLaunchKernel", 5, 3, "cuda_runtime"),
            event("cuLaunchKernelEx", 8, 3, "cuda_driver"), event("cudaGraphLaunch", 9, 3, "cuda_runtime"),
            event("cudaMemcpyAsync", 12, 3, "cuda_runtime"), event("gemm", 50, 20, "kernel", tid=7),
            event("decode", 60, 30, "kernel", tid=13), event("Memcpy DtoH", 200, 10, "gpu_memcpy", tid=7),
        )
    )  # fmt: skip
    assert [(each.name, each.calls) for each in figures.kernels] == [("decode", 1), ("gemm", 1), ("Memcpy DtoH", 1)]
    assert figures.launches == 3
    assert figures.kernel_s == pytest.approx(50e-6), "two at once count once"


def test_the_list_of_kernels_is_bounded() -> None:
    assert len(read_trace(trace(*[event(f"op{i}", i, 1) for i in range(500)])).kernels) == MOST_KERNELS
