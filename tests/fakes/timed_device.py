"""A harness whose steps take time. The device's time is made up."""

from __future__ import annotations

import itertools

from engine_harness import Harness

from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.prompt_order import SlackOrder

STEP_S, TOKEN_S = 0.004, 0.001  # of a step, and of each of its tokens


class Device:
    """A harness whose steps take time: `step` runs one to its end. Times of tokens are kept by sample."""

    def __init__(self, launch_s: float = 0.0, **options: float) -> None:
        """`launch_s`: the least that a step with prompt work takes."""
        self.now = 0.0
        self.launch_s = launch_s
        self.clock = StepClock(lambda: self.now)
        order = SlackOrder(options.get("ttft_target_ms", 300) / 1e3, self.clock)
        options = {"max_num_batched_tokens": 64, **options}
        self.harness = Harness(
            num_blocks=400, pipelined=False, limits_prompt_work=True, prompt_order=order, clock=self.clock, **options
        )  # type: ignore[arg-type]
        self.state = self.harness.scheduler.state
        self.state.step_times.measured({tokens: max(launch_s, STEP_S + tokens * TOKEN_S) for tokens in (8, 16, 32, 64)})
        self.times: dict[tuple[str, int], list[float]] = {}

    def step(self) -> int:
        """Returns the number of tokens of the step."""
        self.harness.core.launch()
        running = self.clock.running
        num_tokens = 0 if running is None else running.num_tokens
        least_s = 0.0 if running is None or not running.num_prompt_tokens else self.launch_s
        self.now += max(least_s, STEP_S + num_tokens * TOKEN_S)
        before = {key: len(tokens) for key, tokens in self.harness.tokens.items()}
        for event in self.harness.core.read():
            self.harness._take(event)
        for key, tokens in self.harness.tokens.items():
            self.times.setdefault(key, []).extend([self.now] * (len(tokens) - before.get(key, 0)))
        return num_tokens

    def tpot_s(self, name: str) -> float:
        times = self.times[name, 0]
        return (times[-1] - times[0]) / (len(times) - 1)

    def largest_gap_s(self, name: str) -> float:
        times = self.times[name, 0]
        return max(after - before for before, after in itertools.pairwise(times))
