"""Prometheus metrics of a router process, and the nodes' last statuses re-exported at scrape time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.placing.view import NodeView

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
STATUS_FIELDS = (
    "num_running", "num_waiting", "num_waiting_tokens", "num_free_blocks", "num_blocks", "block_size", "draining",
)  # fmt: skip


Mode = Literal["livemin", "livemax", "sum"]
# Figures that all workers of a router see alike. Of others the sum is shown, which includes workers that have ended.
SEEN_BY_ALL: dict[str, Mode] = {
    "nodes_known": "livemax",
    "nodes_unreachable": "livemax",
    "directory_connected": "livemin",
    "directory_entries": "livemax",
}


class RouterMetrics:
    """What /metrics shows; one per process. `views` yields the connected nodes, `figures` what this process counts
    elsewhere, shown as gauges."""

    def __init__(self, views: Callable[[], Iterable[NodeView]], figures: Callable[[], dict[str, float]] = dict) -> None:
        self.registry = registry = CollectorRegistry()
        self._nodes = _NodeCollector(views)
        self._read_figures, self._figures = figures, dict[str, Gauge]()
        self.responses = Counter(
            "tandem_router_responses", "Completion requests ended, by HTTP status", ["status"], registry=registry
        )
        self.ends = Counter(
            "tandem_router_prompts_ended", "Prompts ended, by outcome (finished or the error's code)", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.placements = Counter(
            "tandem_router_placements", "Attempts placed on nodes, by reason", ["reason"], registry=registry
        )
        self.retries = Counter("tandem_router_retries", "Attempts after the first", registry=registry)
        self.dropped_deltas = Counter(
            "tandem_router_dropped_deltas", "Token deltas that came late, twice or for nobody", registry=registry
        )
        self.nodes_lost = Counter("tandem_router_nodes_lost", "Nodes that were lost", registry=registry)
        self.stuck_clients = Counter(
            "tandem_router_stuck_clients", "Streams aborted because the client did not read", registry=registry
        )
        self.prompt_tokens = Counter("tandem_router_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.output_tokens = Counter("tandem_router_output_tokens", "Output tokens emitted", registry=registry)
        self.cached_tokens = Counter(
            "tandem_router_cached_tokens", "Prompt tokens found in a prefix cache", registry=registry
        )
        self.active = Gauge(
            "tandem_router_active_prompts", "Prompts under way", registry=registry, multiprocess_mode="livesum"
        )
        self.queue_s = _histogram("queue_s", "Seconds from arrival to placement", LATENCY_BUCKETS_S, registry)
        self.ttft_s = _histogram("ttft_s", "Seconds from arrival to the first token", LATENCY_BUCKETS_S, registry)
        self.itl_s = _WeightedHistogram(
            "tandem_router_itl_s", "Seconds between tokens of one sample", buckets=TOKEN_BUCKETS_S, registry=registry
        )
        self.migration_pause_s = _histogram(
            "migration_pause_s", "Seconds between the last token of one node and the first of the next, of sequences "
            "that were handed over while they ran", TOKEN_BUCKETS_S, registry,
        )  # fmt: skip
        self.e2e_s = _histogram("e2e_s", "Seconds from arrival to the end of a prompt", LATENCY_BUCKETS_S, registry)

    def observe_step(self, gaps_s: dict[float, int], num_tokens: int) -> None:
        """Counts what one message brought: gap between tokens in seconds -> how often it occurred, and the number of
        tokens. Most gaps of a step are equal, since the tokens before came in one message too."""
        for gap_s, count in gaps_s.items():
            self.itl_s.observe_many(gap_s, count)
        self.output_tokens.inc(num_tokens)

    def note_figures(self) -> None:
        """Notes this process's figures, at every heartbeat: of several workers, any may be asked for all figures."""
        for name, value in self._read_figures().items():
            if name not in self._figures:
                text, mode = "A figure of this router, over all its workers", SEEN_BY_ALL.get(name, "sum")
                self._figures[name] = Gauge(
                    f"tandem_router_{name}", text, registry=self.registry, multiprocess_mode=mode
                )
            self._figures[name].set(value)

    def exposition(self) -> bytes:
        """Text format 0.0.4. With several workers, the sum over them (prometheus_client's multiprocess mode)."""
        self.note_figures()
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry) + generate_latest(_only(self._nodes))
        combined = CollectorRegistry()
        multiprocess.MultiProcessCollector(combined)
        return generate_latest(combined) + generate_latest(_only(self._nodes))


class _WeightedHistogram(Histogram):
    def observe_many(self, amount: float, count: int) -> None:
        """Does what `observe(amount)` does, `count` times."""
        self._sum.inc(amount * count)
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            if amount <= bound:
                bucket.inc(count)
                break


class _NodeCollector(Collector):
    def __init__(self, views: Callable[[], Iterable[NodeView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        views = list(self._views())
        labels = ["node", "role"]
        for name in STATUS_FIELDS:
            family = GaugeMetricFamily(f"tandem_node_{name}", f"Status.{name} of a connected node", labels=labels)
            for view in views:
                family.add_metric([view.info.node_id, view.info.role], float(getattr(view.status, name)))
            yield family
        counters = GaugeMetricFamily(
            "tandem_node_counter", "Counters that a connected node reports", labels=[*labels, "counter"]
        )
        for view in views:
            for name, value in view.status.counters.items():
                counters.add_metric([view.info.node_id, view.info.role, name], value)
        yield counters


def _only(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"tandem_router_{name}", text, buckets=buckets, registry=registry)
