"""Counters of a cluster whose processes start again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import httpx

from real_cluster import RealCluster
from tandem.router.metrics.nodes import read_nodes


class Counted:
    """What nodes have counted, those that are gone included, as far as `look` has seen it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._last: dict[tuple[str, str], float] = {}
        self.totals: Counter[str] = Counter(dict.fromkeys(names, 0))

    def look(self, cluster: RealCluster) -> None:
        """Adds what came since the last time; of a router that is being hurt nothing can be heard."""
        with contextlib.suppress(httpx.HTTPError):
            for node_id, node in read_nodes(cluster.metrics()).items():
                for name in self._names:
                    value, before = node.figures.get(name, 0.0), self._last.get((node_id, name), 0.0)
                    self.totals[name] += int(value - before if value >= before else value)
                    self._last[node_id, name] = value
