"""Ticks of a cluster as the points that the dashboard draws. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tandem.router.metrics.model_metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S
from tandem.router.watching.fleet import SLOW, FleetSample
from tandem.router.watching.samples import TICK_S, RouterSample

RATE_TICKS, QUANTILE_TICKS = 5, 15  # over which a point looks back; guesses: calm lines that still follow soon
BOUNDS_S = {"ttft": LATENCY_BUCKETS_S, "itl": TOKEN_BUCKETS_S, "gap": TOKEN_BUCKETS_S}
QUANTILES = {"50": 0.5, "95": 0.95}
# Rates of a point, each the growth a second of these counters.
RATES = {
    "out_tokens": ("output_tokens",),
    "in_tokens": ("prompt_tokens_taken",),
    "finished": ("finished",),
    "kept": ("kept",),
    "missed": ("missed",),
    "pushed": ("kv_pushed_bytes",),
    "loaded": ("tier_loaded_bytes", "tier_fetched_bytes"),
    "handoffs": ("sink_commits",),
    "redone": ("sink_recomputes", "sink_failures"),
    **{key: (key,) for key in SLOW},
}
SERIES = (
    *(f"{name}{quantile}" for name in BOUNDS_S for quantile in QUANTILES),
    *RATES,
    *("failed", "push_rate", "hit_pool", "hit_host", "hit_disk", "hit_peer", "kv_pool", "kv_host", "kv_disk"),
    *("unplaced", "running", "queued", "slack", "late"),
    *("busy_prompts", "busy_tokens"),
)

Point = dict[str, float | None]
_Sum = Callable[[int, str], float]


class PointMaker:
    """Makes a point of each tick, looking back at those before it."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[RouterSample, FleetSample]] = deque(maxlen=QUANTILE_TICKS)

    def point(self, router: RouterSample, fleet: FleetSample) -> Point:
        """The point of the next tick: for each of SERIES a value, or None where there is nothing to say. Times are in
        seconds, rates a second, shares 0 to 1."""
        self._ticks.append((router, fleet))
        found: Point = {name: self._rate(*counters) for name, counters in RATES.items()}
        found["failed"] = max(0.0, self._rate("ended") - self._rate("finished"))
        for name, bounds in BOUNDS_S.items():
            counts = self._counts(name, len(bounds) + 1)
            for suffix, share in QUANTILES.items():
                found[name + suffix] = quantile(bounds, counts, share)
        push_s = self._sum(QUANTILE_TICKS, "kv_push_s")
        found["push_rate"] = self._sum(QUANTILE_TICKS, "kv_pushed_bytes") / push_s if push_s else None
        found |= _hits(self._sum)
        found |= {f"kv_{name}": fleet.shares.get(name) for name in ("pool", "host", "disk")}
        slacks = [router.least_slack_s for router, _ in list(self._ticks)[-RATE_TICKS:]]
        found["slack"] = min((slack for slack in slacks if slack is not None), default=None)
        nodes = max(1, fleet.nodes)
        found |= {f"busy_{work}": min(1.0, self._rate(f"busy_{work}_s") / nodes) for work in ("prompts", "tokens")}
        now = {"unplaced": router.waiting, "running": fleet.running, "queued": fleet.waiting}
        found |= {**now, "late": router.late}
        return {name: _short(found[name]) for name in SERIES}

    def _sum(self, num_ticks: int, name: str) -> float:
        newest = list(self._ticks)[-num_ticks:]
        return sum(router.added.get(name, 0.0) + fleet.added.get(name, 0.0) for router, fleet in newest)

    def _rate(self, *names: str) -> float:
        num_ticks = min(RATE_TICKS, len(self._ticks))
        return sum(self._sum(RATE_TICKS, name) for name in names) / (num_ticks * TICK_S)

    def _counts(self, name: str, num_buckets: int) -> list[int]:
        counts = [0] * num_buckets
        for router, _ in self._ticks:
            for index, more in router.buckets.get(name, ()):
                counts[index] += more
        return counts


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which that share lies, on a straight line within its bucket, as Prometheus reckons it; None
    without any. Of the last bucket, which has no upper bound, its lower one."""
    rank, below = share * sum(counts), 0
    if not rank:
        return None
    for index, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= rank:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (rank - below) / count
        below += count
    return bounds[-1]


def _hits(added: _Sum) -> Point:
    """Shares of the prompts' tokens that were found, by where."""
    looked_up = added(QUANTILE_TICKS, "prompt_tokens")
    names = {"host": "tier_host_hit_tokens", "disk": "tier_disk_hit_tokens", "peer": "pull_tokens"}
    if not looked_up:
        return dict.fromkeys(f"hit_{name}" for name in ("pool", *names))
    below = {name: added(QUANTILE_TICKS, counter) / looked_up for name, counter in names.items()}
    pool = added(QUANTILE_TICKS, "cached_tokens") / looked_up - sum(below.values())
    return {"hit_pool": max(0.0, pool), **{f"hit_{name}": min(1.0, share) for name, share in below.items()}}


def _short(value: float | None) -> float | None:
    """The value with four digits that count, which is all that a picture shows."""
    return None if value is None else float(f"{value:.4g}")
