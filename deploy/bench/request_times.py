"""The times of requests as a client measured them, and what they come to. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass
class RequestTimes:
    """The measured times of one request, in seconds on the monotonic clock."""

    sent_at: float
    event_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, by what the server says
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of the answer, names in lower case
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds; NaN when no token came."""
        return self.event_times[0] - self.sent_at if self.event_times else math.nan

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, in seconds; NaN with fewer than two tokens."""
        return (self.event_times[-1] - self.event_times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else math.nan

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in pairwise(self.event_times)]


def summarize(samples: Sequence[RequestTimes], duration_s: float) -> dict[str, Any]:
    """The report over all requests; failed ones count as failed and nowhere else."""
    good = [sample for sample in samples if not sample.error and sample.event_times]
    gaps = [gap for sample in good for gap in sample.gaps_s]
    per_token = [s.tpot_s for s in good if s.num_tokens > 1]
    num_tokens = sum(sample.num_tokens for sample in good)
    return {
        "num_requests": len(samples),
        "num_failed": len(samples) - len(good),
        "errors": sorted({sample.error or "no token came" for sample in samples if sample not in good})[:5],
        "duration_s": round(duration_s, 4),
        "requests_per_s": round(len(good) / duration_s, 3),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / duration_s, 2),
        "ttft_s": distribution([s.ttft_s for s in good]),
        "itl_s": distribution(gaps),
        "tpot_s": distribution(per_token),
        "e2e_s": distribution([s.ended_at - s.sent_at for s in good]),
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, nearest-rank percentiles and maximum, rounded to microseconds; empty without values."""
    if not values:
        return {}
    ranks = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    summary = {"mean": sum(values) / len(values), **ranks, "max": max(values)}
    return {name: round(value, 6) for name, value in summary.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile by nearest rank; NaN without values."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1] if values else math.nan
