"""Which prompts go first, and who gives way to them. Pure.

A prefill node serves many prompts to one end each: their first tokens in time. `SlackOrder` is earliest deadline first
as long as everyone can make it; where not, the largest remaining work gives way until the others can (Moore 1968: the
fewest late jobs). What gave way goes last, where it takes what the others leave and a fixed share against starvation;
among that, what has little left goes before what came earlier: a tail whose prefix has been computed meanwhile.
(Plain earliest deadline first collapses under overload, where each late prompt makes the next one late.)

Priorities come before all this. A request that waits takes the slot and the blocks of running ones of lower priority,
which start over later, from what is still cached here or in a lower tier. Nobody starves: a sequence gives way so
MOST_YIELDS times at most, and one that has waited for AGED_AFTER_S goes before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from tandem.engine.contracts.rate import LATE_STRETCH, STRETCH, Due, fewest_late
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Request

LATE_SHARE = 1 / 16  # of the prompt tokens that are computed while late prompts wait; a guess
MAX_CREDIT = 2048.0  # tokens: one chunk; a guess
MOST_YIELDS = 3  # a guess
AGED_AFTER_S = 30.0  # a guess
LOOK_EVERY_S = 1.0  # between two looks for requests that have waited so long; a guess
MARGIN = 0.02  # share of the target that is spared for prompts that have not begun: times are estimates; a guess


CountsTokens = Callable[[Request], int]


class PromptOrder(Protocol):
    """A rule that says in which order prompts are computed; told of what arrives, is launched and ends."""

    def arrived(self, request: Request) -> None: ...

    def arrange(
        self, started: Sequence[Request], waiting: Sequence[Request], num_cached: CountsTokens
    ) -> list[Request]:
        """All requests of both, in the order in which they should be computed. `num_cached` says how many tokens a
        prompt that has not begun would find cached now; others with its prefix may have come since it arrived."""

    def launched(self, tokens: Sequence[tuple[Request, int]]) -> None:
        """Notes that a step with these numbers of prompt tokens was launched."""

    def ended(self, request: Request) -> None: ...

    @property
    def has_late(self) -> bool:
        """Whether what was arranged last holds prompts that can't have their first token in time."""


class ArrivalOrder:
    """The order in which prompts that have begun come first, then the others by priority and arrival."""

    has_late = False

    def arrived(self, request: Request) -> None: ...

    def arrange(
        self, started: Sequence[Request], waiting: Sequence[Request], num_cached: CountsTokens
    ) -> list[Request]:
        return [*started, *waiting]

    def launched(self, tokens: Sequence[tuple[Request, int]]) -> None: ...

    def ended(self, request: Request) -> None: ...


class SlackOrder:
    """The order by deadlines of the module docstring. `target_s` is the time from arrival to first token of requests to
    which no other was promised. A prompt that alone would take longer than this / `stretch` gets `stretch` times what
    it takes. Work is estimated from the time of earlier steps, which `clock` measures. A stream that computes again
    what it lost is due when its next token is."""

    def __init__(self, target_s: float, clock: StepClock, stretch: float = STRETCH) -> None:
        self._clock = clock
        self._target_s = target_s
        self._stretch = stretch
        self._arrivals: dict[Request, float] = {}
        self._late: Request | None = None  # the first of those behind their deadline
        self._credit = 0.0  # tokens that late prompts may compute before others

    def arrived(self, request: Request) -> None:
        self._arrivals[request] = self._clock.now() - request.prompt.waited_s

    def ended(self, request: Request) -> None:
        self._arrivals.pop(request, None)

    @property
    def has_late(self) -> bool:
        return self._late is not None

    def deadline(self, request: Request) -> float:
        # A stream that was taken over hasn't arrived here until it loses its blocks.
        arrived_at = self._arrivals.setdefault(request, self._clock.now())
        if request.first_token_at:
            return request.next_token_due(request.targets.tpot_s, self._clock.now())
        alone = request.num_prompt_tokens / request.num_nodes * self._clock.seconds_per_token
        within_s = request.targets.ttft_s or self._target_s
        return arrived_at + max(within_s, self._stretch * alone)

    def arrange(
        self, started: Sequence[Request], waiting: Sequence[Request], num_cached: CountsTokens = lambda request: 0
    ) -> list[Request]:
        token_s = self._clock.seconds_per_token
        on_time, late = fewest_late(self.due(started, waiting, num_cached), token_s, self._clock.busy_until())
        patience_s = LATE_STRETCH * token_s
        late.sort(key=lambda d: (d.priority, self._arrivals[d.prompt] + patience_s * d.num_tokens, d.order))
        first, last = [d.prompt for d in on_time], [d.prompt for d in late]
        self._late = last[0] if last else None
        if late and (not first or self._credit >= min(late[0].num_tokens, MAX_CREDIT)):
            return [last[0], *first, *last[1:]]
        return first + last

    def due(
        self, started: Sequence[Request], waiting: Sequence[Request], num_cached: CountsTokens
    ) -> list[Due[Request]]:
        """Says of each when its next token is due and what is left of it to compute, as `arrange` takes them."""
        spare_s = MARGIN * self._target_s
        due = [Due(r, self.deadline(r), r.num_own_tokens, r.priority, r.order) for r in started]
        for r in waiting:
            # A share of another node's prompt has its blocks, whatever is cached.
            left = max(1, r.num_own_tokens - (0 if r.has_help and r.block_ids else num_cached(r)))
            due.append(Due(r, self.deadline(r), left, r.priority, r.order, spare_s))
        return due

    def launched(self, tokens: Sequence[tuple[Request, int]]) -> None:
        if self._late is None:
            self._credit = 0.0
            return
        total = sum(count for _, count in tokens)
        spent = sum(count for request, count in tokens if request is self._late)
        self._credit = min(MAX_CREDIT, self._credit + LATE_SHARE * total - spent)


def who_gives_way(running: list[Request], request: Request) -> list[Request]:
    """The requests that `request` may preempt, the least important first. `running` is in the order of sort keys, so
    that nobody is looked at where none is less important. A request that is being handed off is not among them, nor one
    that several nodes compute, since transfers may read its blocks."""
    return [
        other
        for other in takewhile(lambda each: each.priority > request.priority, reversed(running))
        if other.num_yields < MOST_YIELDS and other.prompt.mode != "prefill" and not (other.is_paused or other.has_help)
    ]


class Aging:
    """Lets requests of low priority have their turn."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked_at = now()

    def due(self, waiting: list[Request]) -> list[Request]:
        """The requests of `waiting` (in the order of their keys) that have waited too long behind others."""
        now = self._now()
        if not waiting or waiting[0].priority == waiting[-1].priority or now - self._looked_at < LOOK_EVERY_S:
            return []
        self._looked_at = now
        return [each for each in waiting if not each.is_aged and now - each.waiting_since >= AGED_AFTER_S]
