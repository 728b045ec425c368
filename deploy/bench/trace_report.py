"""The results of a run over a trace with one policy: hits by tier, latencies, goodput, balance. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.engine.contracts.wire.parts import Targets

TIERS = ("gpu", "cpu", "peer")


@dataclass(frozen=True)
class TraceReport:
    """Hits in shares of all prompt tokens (not computed again / prompt tokens); loads are busiest / mean, of all
    work until the last request came, and of prompt work."""

    hits: dict[str, float]
    ttft_s: tuple[float, float, float]  # p50, p90, p99
    tpot_s: tuple[float, float, float]
    num_requests: int
    goodput: float  # requests a second that met both targets
    good_share: float
    busy_imbalance: float
    prefill_imbalance: float
    duration_s: float

    @property
    def hit_rate(self) -> float:
        return sum(self.hits.values())

    def row(self, name: str) -> list[str]:
        shares = [f"{100 * self.hits.get(tier, 0.0):.1f}" for tier in TIERS]
        times = [f"{value:.2f}" for value in self.ttft_s] + [f"{1e3 * value:.1f}" for value in self.tpot_s]
        loads = [f"{self.busy_imbalance:.2f}", f"{self.prefill_imbalance:.2f}"]
        good = [f"{self.goodput:.2f}", f"{100 * self.good_share:.1f}"]
        return [name, f"{100 * self.hit_rate:.1f}", *shares, *times, *good, *loads]


HEADER = [
    "policy",
    "hit %",
    *(f"{tier} %" for tier in TIERS),
    *(f"TTFT p{p} s" for p in (50, 90, 99)),
    *(f"TPOT p{p} ms" for p in (50, 90, 99)),
    "good/s",
    "good %",
    "busy max/mean",
    "prefill max/mean",
]


def summarize_jobs(jobs: Sequence[Job], nodes: Sequence[SimulatedNode], targets: Targets) -> TraceReport:
    total = sum(job.request.num_prompt_tokens for job in jobs)
    ttft = [job.first_token_at - job.arrived_at for job in jobs]
    tpot = [_tpot_s(job) for job in jobs]
    num_good = sum(t <= targets.ttft_s and p <= targets.tpot_s for t, p in zip(ttft, tpot, strict=True))
    duration_s = max(job.finished_at for job in jobs) - jobs[0].arrived_at
    return TraceReport(
        hits={tier: sum(job.hits.get(tier, 0) for job in jobs) / total for tier in TIERS},
        ttft_s=_percentiles(ttft),
        tpot_s=_percentiles([p for p, job in zip(tpot, jobs, strict=True) if job.request.num_output_tokens > 1]),
        num_requests=len(jobs),
        goodput=num_good / duration_s,
        good_share=num_good / len(jobs),
        busy_imbalance=_imbalance([node.loaded_s for node in nodes]),
        prefill_imbalance=_imbalance([node.prefill_s for node in nodes]),
        duration_s=duration_s,
    )


def _tpot_s(job: Job) -> float:
    return (job.finished_at - job.first_token_at) / max(1, job.request.num_output_tokens - 1)


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile by nearest rank; zeros without values."""
    ordered = sorted(values) or [0.0]
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99


def _imbalance(loads: Sequence[float]) -> float:
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
