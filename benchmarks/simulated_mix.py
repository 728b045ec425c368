"""Chat beside long prompts on two simulated nodes, by how they divide the work, and how soon nodes lean the other way
when the mix changes.

    python benchmarks/simulated_mix.py

Prints, for each rate and division, the share of chats and of long prompts that keep their targets, percentiles, and
those of the gaps between tokens on all nodes, hand-overs aside;
then, by the time that is promised a token, who of all keeps targets where nodes do all work and in each fixed division.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from tandem.deploy.bench.simulated.cluster import Simulation
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.deploy.explain import table
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.wire.parts import Targets

CHAT, LONG = (256, 256), (8192, 32)  # prompt tokens, output tokens
TARGETS = Targets(ttft_s=0.3, tpot_s=0.007)
# One node a prompt, as routers have it by default.
NODES = partial(ClusterShape, gpu_tokens=850_000, host_tokens=524_288, most_nodes=1)


def requests(rate: float, seconds: float, long_share: float, begin: float = 0.0, seed: int = 1) -> list[TraceRequest]:
    """Requests that have nothing in common, at random moments from `begin` on."""
    rng, at, found = random.Random(seed), begin, []
    while (at := at + rng.expovariate(rate)) < begin + seconds:
        num_prompt, num_output = LONG if rng.random() < long_share else CHAT
        hashes = tuple(rng.getrandbits(62) for _ in range(-(-num_prompt // TRACE_BLOCK)))
        found.append(TraceRequest(at, num_prompt, num_output, hashes))
    return found


def divisions() -> Iterator[tuple[str, ClusterShape, PlacementName]]:
    def split(targets: Targets = TARGETS, leans: bool = False) -> ClusterShape:
        return NODES(0, num_prefill=1, num_decode=1, targets=targets, leans=leans)

    yield "1+1", split(Targets(ttft_s=TARGETS.ttft_s)), "prefix_aware"
    yield "1+1, targets", split(), "prefix_aware"
    yield "two that do all work", NODES(2, targets=TARGETS), "prefix_aware"
    yield "two, elastic", NODES(2, targets=TARGETS), "elastic"
    yield "1+1 that lean, elastic", split(leans=True), "elastic"


def is_good(job: Job, targets: Targets = TARGETS) -> bool:
    num_more = job.request.num_output_tokens - 1
    tpot_s = (job.finished_at - job.first_token_at) / num_more
    return job.first_token_at - job.arrived_at <= targets.ttft_s and tpot_s <= targets.tpot_s


def jobs_of(
    shape: ClusterShape, policy: PlacementName, rate: float, seconds: float, num_seeds: int
) -> tuple[list[Job], Counter[float]]:
    """The jobs of some runs that differ by their seeds, and how often streams waited so many seconds for a token."""
    found: list[Job] = []
    gaps: Counter[float] = Counter()
    for seed in range(1, num_seeds + 1):
        simulation = Simulation(shape, policy)
        simulation.run(requests(rate, seconds, 0.2, seed=seed))
        found += simulation.jobs
        for node in simulation.nodes:
            gaps.update(node.gaps)
    return found, gaps


def row(name: str, rate: float, all_jobs: Sequence[Job], gaps: Counter[float]) -> list[str]:
    found = [f"{rate:g}/s", name]
    for shape in (CHAT, LONG):
        jobs = [job for job in all_jobs if job.num_prompt_tokens == shape[0]]
        ttft_ms = sorted(1e3 * (job.first_token_at - job.arrived_at) for job in jobs)
        tpot_ms = sorted(1e3 * (job.finished_at - job.first_token_at) / (shape[1] - 1) for job in jobs)
        good = sum(map(is_good, jobs)) / len(jobs)
        found += [f"{100 * good:.1f}", _percentiles(ttft_ms), _percentiles(tpot_ms)]
    gaps_ms = [(1e3 * seconds, gaps[seconds]) for seconds in sorted(gaps)]
    return [*found, " / ".join(f"{_percentile(gaps_ms, q):.1f}" for q in (0.5, 0.99, 0.999))]


def _percentile(counted: Sequence[tuple[float, int]], q: float) -> float:
    """The q-quantile of values with how often each occurs, in order."""
    left = q * sum(count for _, count in counted)
    for value, count in counted:
        left -= count
        if left <= 0:
            return value
    return counted[-1][0]


def _percentiles(values: Sequence[float]) -> str:
    return " / ".join(f"{values[int(q * (len(values) - 1))]:.1f}" for q in (0.5, 0.99))


def shift(num_prefill: int, num_decode: int) -> Simulation:
    """Half a minute of chat, then of long prompts, on nodes that lean."""
    shape = NODES(0, num_prefill=num_prefill, num_decode=num_decode, targets=Targets(2.0, 0.025), leans=True)
    simulation = Simulation(shape, "elastic")
    num_nodes = num_prefill + num_decode
    simulation.run(requests(12.0 * num_nodes, 30, 0.0) + requests(3.0 * num_nodes, 30, 1.0, begin=30.0, seed=2))
    return simulation


def row_by_target(tpot_ms: float, num_nodes: int, rate: float, seconds: float, num_seeds: int) -> list[str]:
    """Shares of all requests in time, by division."""
    targets = Targets(TARGETS.ttft_s, tpot_ms / 1e3)
    shapes: dict[tuple[ClusterShape, PlacementName], str] = {(NODES(num_nodes, targets=targets), "elastic"): "elastic"}
    shapes[NODES(num_nodes, targets=targets), "prefix_aware"] = "prefix-aware"
    for num_prefill in range(1, num_nodes):
        split = NODES(0, num_prefill=num_prefill, num_decode=num_nodes - num_prefill, targets=targets)
        shapes[split, "prefix_aware"] = f"{num_prefill}+{num_nodes - num_prefill}"
    found = [f"{tpot_ms:g} ms", f"{num_nodes}"]
    for (shape, policy), name in shapes.items():
        jobs, _ = jobs_of(shape, policy, rate, seconds, num_seeds)
        good = sum(is_good(job, targets) for job in jobs) / len(jobs)
        found.append(f"{name} {100 * good:.1f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for rate in (16.0, 8.0):
        for name, shape, policy in divisions():
            rows.append(row(name, rate, *jobs_of(shape, policy, rate, options.seconds, options.seeds)))
    header = ["rate", "nodes", "chat good %", "TTFT ms p50 / p99", "TPOT ms p50 / p99", "long good %",
              "TTFT ms p50 / p99", "TPOT ms p50 / p99", "gaps ms p50 / p99 / p99.9"]  # fmt: skip
    print(table(header, rows))
    for num_nodes in (2, 4):
        for tpot_ms in (7, 9.4, 12, 16, 25):
            print("  ".join(row_by_target(tpot_ms, num_nodes, 8.0 * num_nodes, options.seconds, options.seeds)))
    for num_prefill, num_decode in ((2, 2), (1, 3), (1, 1)):
        changes = [(f"{at - 30:+.1f} s", side) for at, _, side in shift(num_prefill, num_decode).leanings.changes]
        print(f"{num_prefill}+{num_decode}, long prompts in place of chat at 0: {changes}")


if __name__ == "__main__":
    main()
