"""What one router process writes down at each tick for the dashboard: what was added since the last. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.router.recent.ring import RecentRequests

TICK_S = 1.0  # a guess: as often as people like to see figures change, and twice a node's heartbeat
KEPT_TICKS = 600  # ten minutes; a guess: an incident is still to be seen when somebody is told of it
MOST_FLOWS = 128  # pairs of nodes of a tick, those with most tokens; a guess: more lines are no picture


class RouterSample(msgspec.Struct, frozen=True):
    """One tick of a process, or of all together. `number` counts ticks by the host's monotonic clock, so that it is the
    same in all processes. `added` are counters' growths, `buckets` those of histograms, as (bucket, growth)."""

    number: int
    added: dict[str, float] = {}
    buckets: dict[str, list[tuple[int, int]]] = {}
    flows: list[tuple[str, str, int, int]] = []  # (computes, decodes, prompts, their tokens)
    waiting: int = 0
    late: int = 0
    least_slack_s: float | None = None


class RouterTotals(msgspec.Struct, frozen=True):
    """What a process has counted since its start."""

    counters: dict[str, float] = {}
    buckets: dict[str, tuple[int, ...]] = {}


class SampleLog:
    """The newest samples of this process."""

    def __init__(self) -> None:
        self._samples: deque[RouterSample] = deque(maxlen=KEPT_TICKS)
        self._before: RouterTotals | None = None

    def take(self, number: int, totals: RouterTotals, recent: RecentRequests, waiting: int, now: float) -> None:
        """Writes a tick down."""
        before, self._before = self._before or totals, totals
        flows = sorted(recent.take_flows().items(), key=lambda flow: -flow[1][1])
        sample = RouterSample(
            number=number,
            added=grown(before.counters, totals.counters),
            buckets={
                name: _grown_buckets(before.buckets.get(name, counts), counts)
                for name, counts in totals.buckets.items()
            },
            flows=[(*pair, *counts) for pair, counts in flows[:MOST_FLOWS]],
            waiting=waiting,
            late=sum(slack < 0 for slack in recent.slacks(now)),
            least_slack_s=min(recent.slacks(now, since=now - TICK_S), default=None),
        )
        self._samples.append(sample)

    def since(self, number: int) -> list[RouterSample]:
        """The samples after the tick of that number, the oldest first."""
        found: list[RouterSample] = []
        for sample in reversed(self._samples):
            if sample.number <= number:
                break
            found.append(sample)
        return found[::-1]


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters gained; nothing of one that began anew."""
    return {name: more for name, value in after.items() if (more := value - before.get(name, 0.0)) > 0}


def _grown_buckets(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    pairs = enumerate(zip(before, after, strict=True))
    return [(index, new - old) for index, (old, new) in pairs if new > old]


def merged(number: int, samples: Iterable[RouterSample]) -> RouterSample:
    """One tick of all the processes whose samples these are."""
    added: dict[str, float] = {}
    buckets: dict[str, list[tuple[int, int]]] = {}
    flows: list[tuple[str, str, int, int]] = []
    waiting = late = 0
    slacks: list[float] = []
    for sample in samples:
        for name, value in sample.added.items():
            added[name] = added.get(name, 0.0) + value
        for name, counts in sample.buckets.items():
            buckets.setdefault(name, []).extend(counts)
        flows += sample.flows
        waiting, late = waiting + sample.waiting, late + sample.late
        if sample.least_slack_s is not None:
            slacks.append(sample.least_slack_s)
    return RouterSample(number, added, buckets, flows, waiting, late, min(slacks, default=None))
