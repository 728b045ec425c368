"""Memory, descriptors and threads of a cluster that serves for a while: samples, their slope, and what it says."""

from __future__ import annotations

import contextlib
import csv
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
from asks import VOCABULARY, Ask
from clients import Clients
from processes import named_processes

from real_cluster import RealCluster
from tandem.deploy.options import DEMO_MODEL

EVERY_S = 3.0
COLUMNS = ("rss", "pss", "fds", "threads")  # bytes, bytes, numbers
# Growth, from the first third to the end, that noise of allocators explains (a guess; a leak of 1 % in an hour passes
# here in 20 minutes, so a longer run says more).
NOISE_BYTES, NOISE_SHARE = 8 << 20, 0.02
NOISE_COUNT = 4  # descriptors or threads


@dataclass(frozen=True)
class MemoryPlan:
    folder: Path
    minutes: float = 20.0
    seed: int = 1
    transport: str = "shm"
    prefill: int = 1
    decode: int = 2
    clients: int = 6
    max_tokens: int = 120  # up to; few make it a load of prompts
    arguments: tuple[str, ...] = ()

    @property
    def split(self) -> tuple[str, ...]:
        if self.transport == "local":
            return ()
        nodes = ("--prefill", str(self.prefill), "--decode", str(self.decode))
        return ("--transport", self.transport, "--rebalance-kv", "0.2", *nodes)


@dataclass(frozen=True)
class Sample:
    seconds: float
    process: str
    values: tuple[int, ...]  # as in COLUMNS


class FreshAsks:
    """Never the same prompt twice, half of them begun like others: caches and tiers fill and are evicted."""

    def __init__(self, seed: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        rng = random.Random(seed)
        self.beginnings = [[rng.randrange(2, VOCABULARY) for _ in range(500)] for _ in range(40)]

    def draw(self, rng: random.Random) -> Ask:
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 400))]
        if rng.random() < 0.5:
            prompt = rng.choice(self.beginnings) + prompt
        body = {"prompt": prompt, "max_tokens": rng.randint(1, self._max_tokens), "temperature": 0}
        body["n"] = rng.choice((1, 1, 2))
        return Ask(body, None)


def run_memory_soak(plan: MemoryPlan) -> dict[str, Any]:
    """The summary, which it leaves as summary.json in the folder, beside memory.csv."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    log = plan.folder / "cluster.log"
    cluster = RealCluster(DEMO_MODEL, *plan.split, *plan.arguments, start_s=180, log=log)
    with cluster, (plan.folder / "memory.csv").open("w", newline="") as file:
        clients = Clients(cluster.url, FreshAsks(plan.seed, plan.max_tokens).draw, plan.seed, plan.clients)
        samples = list(_watch(cluster, plan.minutes * 60, file))
        hung = clients.stop()
        cluster.wait_until_whole(60)
        counted = ("tier_host_blocks", "tier_host_capacity", "tier_loaded_bytes", "tier_host_evictions")
        counters = {name: cluster.counter(name) for name in counted}
    verdicts = judge(samples)
    summary = {
        "seed": plan.seed, "transport": plan.transport, "minutes": plan.minutes, "requests": clients.ends.total(),
        "ends": dict(clients.ends), "wrong": clients.wrong, "hung": hung, "counters": counters, "verdicts": verdicts,
    }  # fmt: skip
    (plan.folder / "summary.json").write_text(json.dumps(summary) + "\n")
    return summary


def _watch(cluster: RealCluster, seconds: float, file: TextIO) -> Iterator[Sample]:
    """Samples of every process; a line of CSV each."""
    writer = csv.writer(file)
    writer.writerow(("seconds", "process", *COLUMNS))
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds:
        for name, process in named_processes(cluster.process.pid).items():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                counts = (process.num_fds(), process.num_threads())
                sample = Sample(round(now, 1), name, (memory.rss, memory.pss, *counts))
                writer.writerow((sample.seconds, name, *sample.values))
                yield sample
        file.flush()
        time.sleep(EVERY_S)


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """For each process and column: first, last, slope an hour after the first third, and `plateau` or `growth`: whether
    by that slope the rest of the run added more than noise, and its last third still did."""
    by_series: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        for column, value in zip(COLUMNS, sample.values, strict=True):
            by_series[sample.process, column].append((sample.seconds, value))
    return [_judge(process, column, points) for (process, column), points in by_series.items() if len(points) >= 6]


def _judge(process: str, column: str, points: list[tuple[float, int]]) -> dict[str, Any]:
    settled, last_third = points[len(points) // 3 :], points[2 * len(points) // 3 :]
    level = settled[0][1]
    noise = max(NOISE_BYTES, NOISE_SHARE * level) if column not in ("fds", "threads") else NOISE_COUNT
    added = slope(settled) * (settled[-1][0] - settled[0][0])
    added_late = slope(last_third) * (last_third[-1][0] - last_third[0][0])
    grows = added > noise and added_late > noise / 2
    return {
        "process": process, "what": column, "first": points[0][1], "middle": level, "last": points[-1][1],
        "an_hour": round(slope(settled) * 3600), "verdict": "growth" if grows else "plateau",
    }  # fmt: skip


def slope(points: list[tuple[float, int]]) -> float:
    """Of the line of least squares, a second."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
