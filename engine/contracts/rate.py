"""What one unit of some work takes, smoothed over measurements, and which prompts can be in time by that: nodes order
them by this rule, and routers foresee it. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

SMOOTHING = 0.2  # a guess: the weight of the newest measurement
FORGETTING = 0.98  # a guess: what each `doubt` leaves of a rate
# A prompt that alone would take longer than is promised is due after so many times what it takes; a guess.
STRETCH = 1.25
# Late prompts go in the order of arrival time, or of deadline, plus this many times their remaining work, in seconds; a
# guess.
LATE_STRETCH = 8.0
# What is aimed at, as a share of a target for each token: clients also count the time on the network;
# docs/measurements.md#elastic-placement-at-tight-targets.
AIMED_AT = 0.95


class Rate:
    """Seconds for each unit (a block, a token); 0: nothing measured yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, num: int, seconds: float) -> None:
        if num:
            each = seconds / num
            self.seconds += SMOOTHING * (each - self.seconds) if self.seconds else each

    def doubt(self) -> None:
        """Lowers the rate a little. To be called when the rate kept us from work that would have measured it again."""
        self.seconds *= FORGETTING


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Due(Generic[T]):
    """A prompt that waits to be computed, or is. Times are seconds of one monotonic clock."""

    prompt: T
    due_at: float
    num_tokens: int  # left to compute
    priority: int = 0
    order: int = 0  # decides among equals
    spare_s: float = 0.0  # how much sooner than `due_at` it is aimed at


def fewest_late(prompts: Iterable[Due[T]], token_s: float, free_at: float) -> tuple[list[Due[T]], list[Due[T]]]:
    """Returns the prompts that make it, in the order in which they are to be computed from `free_at` on at `token_s` a
    token, and those that don't. They are taken by deadline, and as long as one would be late the largest gives way
    (Moore 1968)."""
    ordered = sorted(prompts, key=lambda p: (p.priority, p.due_at, p.order))
    late: dict[int, Due[T]] = {}
    largest: list[tuple[int, int, float, int]] = []  # a heap
    for index, each in enumerate(ordered):
        heapq.heappush(largest, (-each.priority, -each.num_tokens, -each.due_at, index))
        free_at += each.num_tokens * token_s
        if free_at > each.due_at - each.spare_s:
            *_, gives_way = heapq.heappop(largest)
            late[gives_way] = ordered[gives_way]
            free_at -= ordered[gives_way].num_tokens * token_s
    if not late:
        return ordered, []
    return [each for index, each in enumerate(ordered) if index not in late], list(late.values())
