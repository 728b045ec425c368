"""Times of enqueued work, and the rates of a copy and of a matrix product that they are read beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAD_CYCLES = 2_000_000  # about a millisecond of a GPU: time for the host to enqueue what is measured; a guess
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Limits:
    """What the device does at best, measured in this process."""

    bytes_s: float  # read and written by a copy
    operations_s: float  # of a large matrix product in the given dtype, a multiplication and an addition each


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median time of `run` on `device`. On a GPU between events, the host ahead of it: launches cost nothing."""
    run()
    run()
    return statistics.median(_on_gpu(run) if device.type == "cuda" else _on_cpu(run) for _ in range(repeats))


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Takes two buffers of COPY_BYTES and three square matrices of PRODUCT_SIZE for the time being."""
    num_bytes, size = COPY_BYTES[device.type], PRODUCT_SIZE[device.type]
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return Limits(copied, 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device))


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds of one call, between two events of the current stream: how late the host is counts."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_event_seconds(run: Callable[[], object], repeats: int, warm: int = 2) -> float:
    """Median of `event_seconds`, after `warm` calls that don't count."""
    return statistics.median([event_seconds(run) for _ in range(warm + repeats)][warm:])


def _on_gpu(run: Callable[[], object]) -> float:
    torch.cuda._sleep(LEAD_CYCLES)
    return event_seconds(run)


def _on_cpu(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
