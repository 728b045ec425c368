"""What the nodes behind a router say of themselves in its `/metrics`: sizes, counters, and what a run added to them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tandem.deploy.bench.sse_client import get_text

STILL_S, MOST_WAIT_S = 0.7, 10.0  # nodes report at each heartbeat, usually half a second; guesses
CAPACITIES = ("host_capacity", "disk_capacity")


@dataclass
class NodeFigures:
    """One node's `status` and `counters` as in `tandem_node_*` of /metrics; what a node doesn't tell is 0."""

    role: str
    status: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counters: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def capacity_tokens(self) -> float:
        """Tokens that its pool and the tiers below hold."""
        below = sum(self.counters[f"tier_{name}"] for name in CAPACITIES)
        return (self.status["num_blocks"] + below) * self.status["block_size"]


Cluster = Mapping[str, NodeFigures]


async def read_nodes(url: str, api_key: str = "") -> dict[str, NodeFigures]:
    """The figures of each node by node_id. Raises HttpError, OSError, or ValueError for what is no exposition."""
    nodes: dict[str, NodeFigures] = {}
    for family in text_string_to_metric_families(await get_text(url, "/metrics", api_key)):
        for name, labels, value, *_ in family.samples:
            if not name.startswith("tandem_node_"):
                continue
            node = nodes.setdefault(labels["node"], NodeFigures(labels["role"]))
            if "counter" in labels:
                node.counters[labels["counter"]] = value
            else:
                node.status[name.removeprefix("tandem_node_")] = value
    return nodes


async def read_when_still(url: str, api_key: str = "") -> dict[str, NodeFigures]:
    """What `read_nodes` reads when every node has reported the end of its work; after some seconds in any case."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + MOST_WAIT_S
    before = await read_nodes(url, api_key)
    while True:
        await asyncio.sleep(STILL_S)
        now = await read_nodes(url, api_key)
        if _work(now) == _work(before) or loop.time() > deadline:
            return now
        before = now


def _work(nodes: Cluster) -> dict[str, tuple[float, float]]:
    return {name: (node.counters["busy_s"], node.counters["prompt_tokens"]) for name, node in nodes.items()}


def added(before: Cluster, after: Cluster, counter: str) -> dict[str, float]:
    """The growth of a counter, by node_id. A node that came meanwhile counted from 0, one that left is not known any
    more."""
    return {
        name: node.counters[counter] - (before[name].counters[counter] if name in before else 0.0)
        for name, node in after.items()
    }


def hits_by_tier(before: Cluster, after: Cluster) -> dict[str, float]:
    """Prompt tokens that were not computed, by where the node that had to compute the prompt got them from."""

    def total(counter: str) -> float:
        return sum(added(before, after, counter).values())

    below = {"cpu": total("tier_host_hit_tokens"), "disk": total("tier_disk_hit_tokens"), "peer": total("pull_tokens")}
    return {"gpu": max(0.0, total("cached_tokens") - sum(below.values())), **below}


def imbalance_by_role(loads: Mapping[str, float], nodes: Cluster) -> dict[str, float]:
    """Busiest / mean of the nodes of one role; what prefill and decode nodes do can't be compared."""
    by_role: dict[str, list[float]] = {}
    for name, load in loads.items():
        by_role.setdefault(nodes[name].role, []).append(load)
    return {role: round(max(of) * len(of) / sum(of), 3) if sum(of) else 1.0 for role, of in sorted(by_role.items())}
