"""The matrix products of one decode step of an 8B Llama as a graph, ours or cuBLAS's, and the limits beside them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from tandem.kernels.check.measure import event_seconds, median_event_seconds
from tandem.kernels.products import matmul

# Name -> outputs, inputs, times a step.
PRODUCTS = {
    "qkv": (6144, 4096, 32),
    "o": (4096, 4096, 32),
    "gate_up": (28672, 4096, 32),
    "down": (4096, 14336, 32),
    "lm_head": (128256, 4096, 1),
}
PAUSE = 0.15  # seconds after which the clock is what it was before work

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def torch_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def our_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    matmul.linear(x, weight, None, out)


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.05


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, whose tensors must outlive it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_ms(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a graph of `run`, in ms."""
    return 1e3 * median_event_seconds(captured(run).replay, repeats, warm=1)


def measure_limits() -> tuple[float, float]:
    """(bytes a second that a large copying kernel reads and writes; FLOP a second of a large product)."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = replay_ms(functools.partial(torch.neg, source, out=target))
    left, right = random_matrix(8192, 8192), random_matrix(8192, 8192)
    out = torch.empty_like(left)
    return 2 * (2 << 30) / copy_ms * 1e3, 2 * 8192**3 / replay_ms(lambda: torch_product(left, right, out)) * 1e3


class Step:
    """One decode step's products in the order of the layers, every layer with its own weights, as one graph."""

    def __init__(self, rows: int, weights: dict[str, list[torch.Tensor]], product: Product) -> None:
        self._weights, self._product = weights, product
        self._inputs = {name: random_matrix(rows, sizes[1]) for name, sizes in PRODUCTS.items()}
        self._outputs = {name: torch.empty_like(random_matrix(rows, sizes[0])) for name, sizes in PRODUCTS.items()}
        self._graph = captured(self._run)

    def _run(self) -> None:
        order = [(name, layer) for layer in range(32) for name in ("qkv", "o", "gate_up", "down")]
        for name, layer in (*order, ("lm_head", 0)):
            self._product(self._inputs[name], self._weights[name][layer], self._outputs[name])

    def milliseconds(self) -> float:
        return 1e3 * event_seconds(self._graph.replay)


def steps_ms(
    rows: int, weights: dict[str, list[torch.Tensor]], products: Iterable[Product], pause: float = 0.0
) -> list[float]:
    """Median ms of a step by each of the products. They take turns, since at 256 rows and more the GPU's power limit
    lowers its clock within a few steps: without pauses all are measured like that, with `pause` seconds before every
    step none."""
    steps = [Step(rows, weights, product) for product in products]
    warm, rounds = (0, 7) if pause else (10, 20)
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(warm + rounds):
        for index in range(len(steps)) if turn % 2 else reversed(range(len(steps))):
            time.sleep(pause)
            times[index].append(steps[index].milliseconds())
    return [statistics.median(of_one[warm:]) for of_one in times]
