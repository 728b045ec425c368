"""Prometheus metrics of a router process (docs/metrics.md); those of nodes are shown as they last reported them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.router.metrics.model_metrics import TOKEN_BUCKETS_S, ModelFamilies, ModelMetrics, bucket_counts, count_of
from tandem.router.metrics.nodes import NodeCollector
from tandem.router.placing.view import NodeView

Mode = Literal["livemin", "livemax", "sum"]
# Figures that all workers of a router see alike. Others are counters, of which the sum is shown, which includes workers
# that have ended.
SEEN_BY_ALL: dict[str, Mode] = {
    "nodes_known": "livemax",
    "nodes_unreachable": "livemax",
    "nodes_other_version": "livemax",
    "nodes_other_wire": "livemax",
    "nodes_other_model": "livemax",
    "directory_connected": "livemin",
    "directory_entries": "livemax",
    "spare_nodes": "livemin",
}
FIGURES = {
    "nodes_known": "Nodes that the router has heard of",
    "nodes_unreachable": "Those of them that it has no connection to",
    "nodes_other_version": "Connected nodes of another version than the router's; they are used",
    "nodes_other_wire": "Nodes that speak another version of the protocol; they are not used",
    "nodes_other_model": "Connected nodes of another model than the one that is served; they are not used",
    "directory_connected": "1: it hears from Redis which node has what cached",
    "directory_entries": "Blocks that the router knows a holder of",
    "spare_nodes": "Nodes' worth of time that what is promised leaves, over a minute (docs/elastic.md)",
    "late_work_seconds": "Work for prompts by which somebody is late; so much more a second, so many nodes lack",
    "failed_handshakes": "Greetings that a node refused or that came to nothing",
    "undecodable_messages": "Messages of nodes that can't be read",
    "resent_messages": "Messages to nodes that were sent again",
    "directory_gaps": "Times that news of cached blocks were missed",
    "directory_snapshots": "Times that a node's cached blocks were read as a whole",
    "directory_forgotten_owners": "Nodes whose cached blocks were forgotten, since they fell silent",
}
PREFIX = "tandem_router_"


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"{PREFIX}{name}", text, labels, registry=registry)


class RouterMetrics:
    """What /metrics shows; one per process. `views` yields the connected nodes, `figures` what this process counts
    elsewhere, by the names of FIGURES, and `model_name` says whose tokens those are that come."""

    def __init__(
        self,
        views: Callable[[], Iterable[NodeView]],
        figures: Callable[[], dict[str, float]] = dict,
        model_name: Callable[[], str] = str,
    ) -> None:
        disable_created_metrics()  # when a series began: a third of all lines, for nobody
        self.registry = registry = CollectorRegistry()
        self._nodes = NodeCollector(views)
        self._read_figures, self._figures = figures, dict[str, Gauge]()
        self._models = ModelFamilies(registry)
        self._read_model_name, self._model = model_name, dict[str, ModelMetrics]()
        counter = partial(_counter, registry)
        self.responses = counter("responses", "Completion requests ended, by HTTP status", "status")
        self.ends = counter("prompts_ended", "Prompts ended, by outcome (finished or the error's code)", "outcome")
        self.placements = counter("placements", "Attempts placed on nodes, by reason", "reason")
        kept = "Prompts ended, by whether their own targets were kept"
        self.promises = counter("prompts_by_promise", kept, "promise")
        self.retries = counter("retries", "Attempts after the first")
        self.dropped_deltas = counter("dropped_deltas", "Token deltas that came late, twice or for nobody")
        self.nodes_lost = counter("nodes_lost", "Nodes that were lost")
        self.stuck_clients = counter("stuck_clients", "Streams aborted because the client did not read")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a prefix cache")
        self.active = Gauge(
            f"{PREFIX}active_prompts", "Prompts under way", registry=registry, multiprocess_mode="livesum"
        )
        self.waiting = Gauge(
            f"{PREFIX}waiting_prompts", "Prompts that no node has yet: with none alive, a reason to start some",
            registry=registry, multiprocess_mode="livesum",
        )  # fmt: skip
        self.migration_pause_s = Histogram(
            f"{PREFIX}migration_pause_seconds", "Between the last token of one node and the first of the next, of "
            "sequences that were handed over while they ran", buckets=TOKEN_BUCKETS_S, registry=registry,
        )  # fmt: skip

        self.handoff_gap_s = Histogram(
            f"{PREFIX}handoff_gap_seconds", "Between the first token, of the node that computed the prompt, and the "
            "next, of another", buckets=TOKEN_BUCKETS_S, registry=registry,
        )  # fmt: skip

    @property
    def model(self) -> ModelMetrics:
        """What requests to the model that is served now come to."""
        name = self._read_model_name()
        found = self._model.get(name)
        if found is None:
            found = self._model[name] = ModelMetrics(self._models, name)
        return found

    def count_promise(self, was_kept: bool | None) -> None:
        """Counts a prompt that has ended; None: it had no targets of its own."""
        self.promises.labels("none" if was_kept is None else "kept" if was_kept else "missed").inc()

    def counted(self) -> tuple[dict[str, float], dict[str, tuple[int, ...]]]:
        """What this process alone has counted of requests: counters, and histograms' buckets; nothing before a model is
        known."""
        if not self._read_model_name():
            return {}, {}
        model = self.model
        counters = {
            "output_tokens": count_of(model.output_tokens),
            "prompt_tokens_taken": count_of(model.prompt_tokens),
            "finished": count_of(self.ends.labels("finished")),
            "ended": float(sum(bucket_counts(model.e2e_s))),
            **{name: count_of(self.promises.labels(name)) for name in ("kept", "missed")},
        }
        histograms = {"ttft": model.ttft_s, "itl": model.itl_s, "gap": self.handoff_gap_s}
        return counters, {name: bucket_counts(histogram) for name, histogram in histograms.items()}

    def note_figures(self) -> None:
        """Notes this process's figures, at every heartbeat: of several workers, any may be asked for all figures."""
        if self._read_model_name():
            _ = self.model  # its series begin at 0, so that their first growth shows
        for name, value in self._read_figures().items():
            if name not in self._figures:
                mode = SEEN_BY_ALL.get(name, "sum")
                self._figures[name] = Gauge(
                    PREFIX + name, FIGURES[name], registry=self.registry, multiprocess_mode=mode
                )
            self._figures[name].set(value)

    def exposition(self) -> bytes:
        """Prometheus' text format. With several workers, the sum over them (prometheus_client's multiprocess mode).
        OpenMetrics is not offered: prometheus_client 0.26 writes vLLM's names with an underscore there."""
        self.note_figures()
        return generate_latest(_Shown([self.own(), self._nodes]))

    def own(self) -> Collector:
        """What the router counts, all its workers together."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return self.registry
        summed = CollectorRegistry()
        multiprocess.MultiProcessCollector(summed)
        return summed


class _Shown(Collector):
    """All families of some collectors. What processes count for themselves is noted in gauges, as they add up over
    workers, and shown as the counters that they are."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for family in collector.collect():
                name = family.name.removeprefix(PREFIX)
                if name in FIGURES and name not in SEEN_BY_ALL:
                    value = sum(sample.value for sample in family.samples)
                    yield CounterMetricFamily(family.name, family.documentation, value)
                else:
                    yield family
