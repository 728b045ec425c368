"""Which prompts go first. Pure: the clock is passed in.

A prefill node serves many prompts to one end each: their first tokens in time. `SlackOrder` is earliest deadline first
as long as everyone can make it; where not, the largest remaining work gives way until the others can (Moore 1968: the
fewest late jobs). What gave way goes last, where it takes what the others leave and a fixed share against starvation;
among that, what has little left goes before what came earlier: a tail whose prefix has been computed meanwhile.
(Plain earliest deadline first collapses under overload, where each late prompt makes the next one late.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.engine.contracts.rate import Rate
from tandem.engine.scheduling.request import Request

LATE_SHARE = 1 / 16  # of the prompt tokens that are computed while late prompts wait
MEASURED_TOKENS = 1024  # small steps, which tell as much about launches, count together: as much as one of so many
MAX_CREDIT = 2048.0  # tokens: one chunk
LATE_STRETCH = 8.0  # a late prompt passes those that came before it by so many times less than they have more left
LAUNCH_S = 0.010  # from a decision to the step's first kernels
STEP_ERROR = 0.08  # by how much of itself a step may be shorter than expected
MARGIN = 0.02  # of the target: to spare for prompts that have not begun, since times are estimated


class PromptOrder(Protocol):
    @property
    def seconds_per_token(self) -> float:
        """Measured, of prompt tokens; 0: nothing measured."""

    def arrived(self, request: Request) -> None: ...

    def arrange(self, started: Sequence[Request], waiting: Sequence[Request]) -> list[Request]:
        """All of both, first the one that should be computed first."""

    def launched(self, step_id: int, tokens: Sequence[tuple[Request, int]]) -> None:
        """A step with these prompt tokens is on its way."""

    def completed(self, step_id: int) -> float:
        """Seconds that the step took."""

    def ended(self, request: Request) -> None: ...

    @property
    def has_late(self) -> bool:
        """Whether what was arranged last holds prompts that can't have their first token in time."""

    def next_decision_at(self) -> float:
        """When the step after the running one should be decided at the latest, so that the device does not wait for it.
        Earlier only makes those wait who come meanwhile and should go first."""


class _Measuring:
    """Seconds that a prompt token takes, measured over at least `measured_tokens`; 0: nothing measured yet."""

    def __init__(self, clock: Callable[[], float], measured_tokens: int = MEASURED_TOKENS) -> None:
        self._clock = clock
        self._measured_tokens = measured_tokens
        self._gathered = (0, 0.0)  # prompt tokens of small steps, and what those took
        self.rate = Rate()
        self._steps: dict[int, tuple[float, int]] = {}  # launched at, prompt tokens
        self._last_completed = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.rate.seconds

    has_late = False

    def launched(self, step_id: int, tokens: Sequence[tuple[Request, int]]) -> None:
        self._steps[step_id] = self._clock(), sum(count for _, count in tokens)

    def next_decision_at(self) -> float:
        if not self._steps:
            return 0.0
        began, num_tokens = next(iter(self._steps.values()))
        expected = num_tokens * self.seconds_per_token
        return max(began, self._last_completed) + expected * (1 - STEP_ERROR) - LAUNCH_S

    def _idle_at(self) -> float:
        """When the device will have done what it was given: a step that runs can't be stopped."""
        now = self._clock()
        if not self._steps:
            return now
        began, _ = next(iter(self._steps.values()))
        num_tokens = sum(num_tokens for _, num_tokens in self._steps.values())
        return max(now, max(began, self._last_completed) + num_tokens * self.seconds_per_token)

    def completed(self, step_id: int) -> float:
        began, num_tokens = self._steps.pop(step_id)
        now = self._clock()
        seconds = now - max(began, self._last_completed)
        self._last_completed = now
        if num_tokens >= self._measured_tokens:
            self.rate.measured(num_tokens, seconds)
        elif num_tokens:
            self._gather(num_tokens, seconds)
        return seconds

    def _gather(self, num_tokens: int, seconds: float) -> None:
        num_gathered, took = self._gathered[0] + num_tokens, self._gathered[1] + seconds
        if num_gathered >= self._measured_tokens:
            self.rate.measured(num_gathered, took)
            num_gathered, took = 0, 0.0
        self._gathered = num_gathered, took


class ArrivalOrder(_Measuring):
    """What has begun goes on; then by priority and arrival, as the queue is sorted. Without a clock it measures
    nothing."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0, measured_tokens: int = MEASURED_TOKENS) -> None:
        super().__init__(clock, measured_tokens)

    def arrived(self, request: Request) -> None: ...

    def arrange(self, started: Sequence[Request], waiting: Sequence[Request]) -> list[Request]:
        return [*started, *waiting]

    def ended(self, request: Request) -> None: ...


class SlackOrder(_Measuring):
    """`target_s`: from arrival to first token. A prompt that alone would take longer than `target_s` / `stretch` gets
    `stretch` times what it takes. Work is estimated from the measured time of the steps before."""

    def __init__(self, target_s: float, clock: Callable[[], float], stretch: float = 1.25) -> None:
        super().__init__(clock)
        self._target_s = target_s
        self._stretch = stretch
        self._arrivals: dict[Request, float] = {}
        self._late: Request | None = None  # the first of those behind their deadline
        self._credit = 0.0  # tokens that late prompts may have before others
        # Tokens of a prompt that has not begun which it would find cached now; others with its prefix may have come.
        self.num_cached_tokens: Callable[[Request], int] = lambda request: 0

    def arrived(self, request: Request) -> None:
        self._arrivals[request] = self._clock()

    def ended(self, request: Request) -> None:
        self._arrivals.pop(request, None)

    @property
    def has_late(self) -> bool:  # type: ignore[override]
        return self._late is not None

    def deadline(self, request: Request) -> float:
        alone = request.num_prompt_tokens * self.seconds_per_token
        return self._arrivals.setdefault(request, self._clock()) + max(self._target_s, self._stretch * alone)

    def arrange(self, started: Sequence[Request], waiting: Sequence[Request]) -> list[Request]:
        begun = set(started)
        due = {request: self.deadline(request) for request in (*started, *waiting)}
        left = {request: request.num_uncomputed_tokens for request in started}
        left.update({r: max(1, r.num_uncomputed_tokens - self.num_cached_tokens(r)) for r in waiting})
        free_at = self._idle_at()
        on_time: list[Request] = []
        late: list[Request] = []
        for request in sorted(due, key=lambda r: (r.priority, due[r], r.order)):
            on_time.append(request)
            free_at += left[request] * self.seconds_per_token
            spare = 0.0 if request in begun else MARGIN * self._target_s
            if free_at > due[request] - spare:
                largest = max(on_time, key=lambda r: (r.priority, left[r], due[r]))
                on_time.remove(largest)
                late.append(largest)
                free_at -= left[largest] * self.seconds_per_token
        patience_s = LATE_STRETCH * self.seconds_per_token
        late.sort(key=lambda r: (r.priority, self._arrivals[r] + patience_s * left[r], r.order))
        self._late = late[0] if late else None
        if late and (not on_time or self._credit >= left[late[0]] or self._credit >= MAX_CREDIT):
            return [late[0], *on_time, *late[1:]]
        return on_time + late

    def launched(self, step_id: int, tokens: Sequence[tuple[Request, int]]) -> None:
        super().launched(step_id, tokens)
        if self._late is None:
            self._credit = 0.0
            return
        total = sum(count for _, count in tokens)
        spent = sum(count for request, count in tokens if request is self._late)
        self._credit = min(MAX_CREDIT, self._credit + LATE_SHARE * total - spent)
