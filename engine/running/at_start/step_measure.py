"""Measures how long mixed steps take on this device, for `StepTimes` (engine/scheduling/step_times.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tandem.engine.scheduling.step import ScheduledRow
from tandem.engine.scheduling.step_times import StepTimes

# Where no graph of that size or a larger one runs steps. A guess: dense where steps are short.
MEASURED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LEAST_TOKENS = 16  # of a step that is measured: smaller ones take as long, to read the weights
NUM_DECODES = 8  # rows of a measured step that are decodes; a guess
REPEATS = 3  # a guess


class DummySteps(Protocol):
    """What measuring needs of a runner."""

    @property
    def device(self) -> torch.device: ...

    @property
    def graph_sizes(self) -> Sequence[int]: ...

    @property
    def prompt_graph_sizes(self) -> Sequence[int]: ...

    def run_dummy(self, rows: Sequence[ScheduledRow]) -> None: ...


def measure_step_times(runner: DummySteps, max_tokens: int, times: StepTimes) -> None:
    """Tells `times` the seconds of mixed steps of up to `max_tokens`, a few decodes and one prompt each: of the size of
    each graph, and of some beyond. Steps are launched back to back, as in serving. Writes no KV."""
    seconds: dict[int, float] = {}
    largest = max(runner.graph_sizes, default=0)
    beyond = runner.prompt_graph_sizes or MEASURED_TOKENS
    for tokens in (*runner.graph_sizes, *(size for size in beyond if size > largest)):
        if LEAST_TOKENS <= tokens <= max_tokens:
            rows = [ScheduledRow(0, 0, 1)] * NUM_DECODES + [ScheduledRow(0, 0, tokens - NUM_DECODES)]
            runner.run_dummy(rows)
            torch.cuda.synchronize(runner.device)
            began = time.perf_counter()
            for _ in range(REPEATS):
                runner.run_dummy(rows)
            torch.cuda.synchronize(runner.device)
            seconds[tokens] = (time.perf_counter() - began) / REPEATS
    times.measured(seconds, max([largest, *runner.prompt_graph_sizes]))
