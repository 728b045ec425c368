"""Measures how long mixed steps take on this device, for `StepTimes` (engine/scheduling/step_times.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tandem.engine.scheduling.step import ScheduledRow

# A guess: dense where steps are short, as graphs are.
MEASURED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NUM_DECODES = 8  # rows of a measured step that are decodes; a guess
REPEATS = 3  # a guess


class DummySteps(Protocol):
    """What measuring needs of a runner."""

    @property
    def device(self) -> torch.device: ...

    def run_dummy(self, rows: Sequence[ScheduledRow]) -> None: ...


def measure_step_times(runner: DummySteps, max_tokens: int) -> dict[int, float]:
    """Number of tokens -> seconds of a mixed step: a few decodes and one prompt. Steps are launched back to back, as in
    serving. Writes no KV."""
    seconds: dict[int, float] = {}
    for tokens in MEASURED_TOKENS:
        if tokens <= max_tokens:
            rows = [ScheduledRow(0, 0, 1)] * NUM_DECODES + [ScheduledRow(0, 0, tokens - NUM_DECODES)]
            runner.run_dummy(rows)
            torch.cuda.synchronize(runner.device)
            began = time.perf_counter()
            for _ in range(REPEATS):
                runner.run_dummy(rows)
            torch.cuda.synchronize(runner.device)
            seconds[tokens] = (time.perf_counter() - began) / REPEATS
    return seconds
