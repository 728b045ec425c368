"""Every metric that a router's /metrics can show, and which of them a query asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.router.metrics.catalog import NODE_METRICS
from tandem.router.metrics.router_metrics import FIGURES, PREFIX, SEEN_BY_ALL, RouterMetrics

_NAME = re.compile(r"\b(?:tandem_|vllm:)\w+")
_PARTS = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}  # what a kind's series end with


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One row of docs/metrics.md."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query can ask for."""
        return tuple(self.name + part for part in _PARTS.get(self.kind, ("",)))


def router_families() -> Iterator[MetricFamily]:
    """What a router counts itself."""
    metrics = RouterMetrics(list)
    for family in metrics.registry.collect():
        collector: Any = metrics.registry._names_to_collectors[family.name]  # the library tells labels in no other way
        yield MetricFamily(family.name, family.type, family.documentation, tuple(collector._labelnames))
    for name, text in FIGURES.items():
        yield MetricFamily(PREFIX + name, "gauge" if name in SEEN_BY_ALL else "counter", text, ())


def node_families() -> Iterator[MetricFamily]:
    """What a router shows of each node."""
    seen: set[str] = set()
    for metric in NODE_METRICS:
        if metric.family not in seen:
            seen.add(metric.family)
            yield MetricFamily(metric.family, metric.kind, metric.text, (metric.label,) if metric.label else ())


def series() -> frozenset[str]:
    return frozenset(name for family in (*router_families(), *node_families()) for name in family.series)


def asked_for(query: str) -> set[str]:
    """The series of ours that a PromQL query names."""
    return set(_NAME.findall(query))
