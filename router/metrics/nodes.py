"""Nodes' last statuses as families of metrics, and read back from an exposition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.engine.contracts.wire.durations import BOUNDS_S, bucket_keys
from tandem.router.metrics.catalog import IN_OTHERS, NODE_METRICS, UNKNOWN, VLLM, NodeMetric
from tandem.router.placing.view import NodeView

NODE, MODEL = ("node", "role"), "model_name"
_FAMILIES = {name: tuple(of) for name, of in groupby(NODE_METRICS, lambda metric: metric.family)}
_TIMES = [metric for metric in NODE_METRICS if metric.kind == "histogram"]
_KEYS = IN_OTHERS.union((metric.key for metric in NODE_METRICS), *(bucket_keys(metric.key) for metric in _TIMES))
_KEY_OF = {(metric.series, metric.value): metric.key for metric in NODE_METRICS}


class NodeCollector(Collector):
    """Shows the last status of each of `views`: the nodes that a router is connected to."""

    def __init__(self, views: Callable[[], Iterable[NodeView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        views = list(self._views())
        for metrics in _FAMILIES.values():
            yield _family(metrics, views)
        if (unlisted := _unlisted(views)).samples:
            yield unlisted


@dataclass
class NodeReading:
    """What an exposition says of one node: its values by the keys of NODE_METRICS, of times the sums; 0 for what it
    doesn't say."""

    role: str
    figures: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def read_nodes(exposition: str) -> dict[str, NodeReading]:
    """The nodes of an exposition, by their ids. Raises ValueError for text that is none."""
    nodes: dict[str, NodeReading] = {}
    for family in text_string_to_metric_families(exposition):
        for series, labels, value, *_ in family.samples:
            if not labels.keys() >= set(NODE) or (family.type == "histogram" and not series.endswith("_sum")):
                continue
            node = nodes.setdefault(labels["node"], NodeReading(labels["role"]))
            mark = next((of for name, of in labels.items() if name not in (*NODE, MODEL)), "")
            node.figures[_KEY_OF.get((series, mark), mark)] = value
    return nodes


def _family(metrics: Sequence[NodeMetric], views: Sequence[NodeView]) -> Metric:
    first = metrics[0]
    kind = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}[first.kind]
    is_vllms = first.family.startswith(VLLM)
    family = kind(first.family, first.text, labels=[*NODE, *[MODEL] * is_vllms, *[first.label] * bool(first.label)])
    for view in views:
        labels = [view.info.node_id, view.info.role, *[view.info.model_name] * is_vllms]
        for metric in metrics:
            value = getattr(view.status, metric.key, None)
            if value is None:
                value = view.status.counters.get(metric.key)
            if value is not None and isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, _buckets(metric.key, view.status.counters), float(value))
            elif value is not None:
                family.add_metric([*labels, *[metric.value] * bool(metric.label)], float(value))
    return family


def _buckets(key: str, counters: Mapping[str, float]) -> list[tuple[str, float]]:
    """How many durations were at most each bound."""
    numbers = accumulate(counters.get(each, 0.0) for each in bucket_keys(key))
    return [(floatToGoString(bound), number) for bound, number in zip(BOUNDS_S, numbers, strict=True)]


def _unlisted(views: Sequence[NodeView]) -> Metric:
    family = GaugeMetricFamily(UNKNOWN, "What a node of another version reports", labels=[*NODE, "key"])
    for view in views:
        for key, value in view.status.counters.items():
            if key not in _KEYS:
                family.add_metric([view.info.node_id, view.info.role, key], value)
    return family
