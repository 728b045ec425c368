"""Measures how long mixed steps take on this device, for `StepTimes` and `StepSizes` (engine/scheduling)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tandem.engine.scheduling.step import ScheduledRow
from tandem.engine.scheduling.times.step_sizes import StepSizes
from tandem.engine.scheduling.times.step_times import StepTimes

# Where no graph of that size or a larger one runs steps. A guess: dense where steps are short.
MEASURED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LEAST_TOKENS = 16  # of a step that is measured: smaller ones take as long, to read the weights
NUM_DECODES = 8  # rows of a measured step that are decodes; a guess
REPEATS = 3  # a guess
TILE_TOKENS = 128  # of products and attention; sizes between multiples of it are not faster by the token
CONTEXT = 8192  # tokens before the chunk of a step whose size is measured; a guess


class DummySteps(Protocol):
    """What measuring needs of a runner."""

    @property
    def device(self) -> torch.device: ...

    @property
    def graph_sizes(self) -> Sequence[int]: ...

    @property
    def prompt_graph_sizes(self) -> Sequence[int]: ...

    @property
    def max_model_len(self) -> int: ...

    def run_dummy(self, rows: Sequence[ScheduledRow]) -> None: ...


def measure_step_times(runner: DummySteps, max_tokens: int, times: StepTimes) -> None:
    """Tells `times` the seconds of mixed steps of up to `max_tokens`, a few decodes and one prompt each: of the size of
    each graph, and of some beyond. Steps are launched back to back, as in serving. Writes no KV."""
    seconds: dict[int, float] = {}
    largest = max(runner.graph_sizes, default=0)
    beyond = runner.prompt_graph_sizes or MEASURED_TOKENS
    for tokens in (*runner.graph_sizes, *(size for size in beyond if size > largest)):
        if LEAST_TOKENS <= tokens <= max_tokens:
            seconds[tokens] = _seconds_of(runner, tokens, 0)
    times.measured(seconds, max([largest, *runner.prompt_graph_sizes]))


def measure_steps(runner: DummySteps, max_tokens: int, times: StepTimes, sizes: StepSizes) -> None:
    """Tells how long steps of up to `max_tokens` take, and which of them are fast by the token."""
    measure_step_times(runner, max_tokens, times)
    measure_step_sizes(runner, max_tokens, sizes)


def measure_step_sizes(runner: DummySteps, max_tokens: int, sizes: StepSizes) -> None:
    """Tells `sizes` the seconds of steps that graphs of prompts run, with a chunk of a long prompt each. Writes no KV.
    None are measured where there are no such graphs."""
    largest, seconds = max(runner.graph_sizes, default=0), dict[int, float]()
    for tokens in runner.prompt_graph_sizes:
        if largest < tokens <= max_tokens and tokens % TILE_TOKENS == 0:
            seconds[tokens] = _seconds_of(runner, tokens, max(0, min(CONTEXT, runner.max_model_len - tokens)))
    if seconds:
        sizes.measured(seconds)


def _seconds_of(runner: DummySteps, tokens: int, context: int) -> float:
    rows = [ScheduledRow(0, 0, 1)] * NUM_DECODES + [ScheduledRow(0, context, tokens - NUM_DECODES)]
    runner.run_dummy(rows)
    _wait_for(runner.device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        runner.run_dummy(rows)
    _wait_for(runner.device)
    return (time.perf_counter() - began) / REPEATS


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
