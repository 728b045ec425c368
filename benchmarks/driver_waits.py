"""What a CUDA driver does for other threads while a stream waits for a value in host memory. Needs a GPU.

    python benchmarks/driver_waits.py

Each line is one thing that a thread does in a stream of its own while another stream waits (`cuStreamWaitValue32`):
whether it was done before the wait ended, and how long it took; where it was not, whether a small copy by a third
thread got through meanwhile. Kernels are loaded when they are launched for the first time, so each product must be one
that the process has not made yet. The last lines: how many graphs the stream that waits takes before a launch is held.
CUDA_MODULE_LOADING=EAGER shows what loading everything at the start changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from tandem.engine.device.cuda_driver import wait_for_value

MOST_S, COPY_S = 2.0, 1.0  # how long an action, and then the copy, may take before the wait is ended
ROWS = (1, 3, 17, 33, 100, 129, 300, 777, 1025, 2049)
KERNELS, MOST_GRAPHS = 12, 3000


class WaitingStream:
    """A stream that waits until it is let go, beside others."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._flag_1 = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._small = torch.zeros(1024, device="cuda")
        self.copy()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self._stream):
            for _ in range(KERNELS):
                self._small.add_(1)

    def wait(self) -> None:
        torch.cuda.synchronize()
        self._flag_1[0] = 0
        wait_for_value(0, self._stream.cuda_stream, self._flag_1.data_ptr(), 1)

    def let_go(self) -> None:
        self._flag_1[0] = 1

    def launch_graphs(self, launched: list[int]) -> None:
        with torch.cuda.stream(self._stream):
            for index in range(MOST_GRAPHS):
                self.graph.replay()
                launched.append(index)

    def copy(self) -> None:
        self._small[:16].copy_(self._small[16:32])


def within(seconds: float, act: Callable[[], object]) -> tuple[threading.Thread, list[float]]:
    """Runs `act` in a thread and stream of its own, and waits so long. The list has the seconds that it took, once it
    is done."""
    took: list[float] = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            began = time.perf_counter()
            act()
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread, took


def told_of_copy(waiting: WaitingStream) -> str:
    """Says, while the stream still waits, whether another thread's copy gets through."""
    return "is held, too" if within(COPY_S, waiting.copy)[0].is_alive() else "passes"


def report(waiting: WaitingStream, name: str, act: Callable[[], object]) -> None:
    waiting.wait()
    thread, took = within(MOST_S, act)
    is_held = thread.is_alive()
    beside = f", a copy beside it {told_of_copy(waiting)}" if is_held else ""
    waiting.let_go()
    thread.join()
    torch.cuda.synchronize()
    print(f"{name:36} {'HELD' if is_held else 'done'} {1e3 * took[0]:9.2f} ms{beside}", flush=True)


def main() -> None:
    waiting, kept = WaitingStream(), list[torch.Tensor]()
    small, weight = torch.zeros(1024, device="cuda"), torch.zeros(6144, 4096, dtype=torch.bfloat16, device="cuda")
    inputs = {rows: torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda") for rows in ROWS}
    actions: dict[str, Callable[[], object]] = {
        "a kernel that is loaded": lambda: small[:8].add_(1),
        "page-locked memory, 3 MiB": lambda: kept.append(torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)),
        "device memory, 64 MiB": lambda: kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda")),
        "an event": lambda: torch.cuda.Event(enable_timing=True).record(),
        "a copy from the host": lambda: small[:4].copy_(torch.zeros(4).pin_memory(), non_blocking=True),
        "device memory given back": lambda: (kept.clear(), torch.cuda.empty_cache()),
        **{
            f"the first product of {rows} rows": lambda x=x: torch.nn.functional.linear(x, weight)
            for rows, x in inputs.items()
        },
        "the first sort": lambda: small.sort(),
        "the first cumulative sum": lambda: small.cumsum(0),
    }
    for name, act in actions.items():
        report(waiting, name, act)
    waiting.wait()
    launched: list[int] = []
    filling, _ = within(MOST_S, lambda: waiting.launch_graphs(launched))
    count, is_held = len(launched), filling.is_alive()
    beside = told_of_copy(waiting)
    waiting.let_go()
    filling.join()
    then = "held" if is_held else "not held"
    print(f"{count} graphs of {KERNELS} kernels launched, then {then}; a copy beside them {beside}")


if __name__ == "__main__":
    main()
