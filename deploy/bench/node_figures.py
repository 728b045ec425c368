"""What the nodes behind a router say of themselves in its `/metrics`: sizes, counters, and what a run added to them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tandem.deploy.bench.sse_client import get_text
from tandem.router.metrics import nodes as shown
from tandem.router.metrics.nodes import NodeReading

STILL_S, MOST_WAIT_S = 0.7, 10.0  # nodes report at each heartbeat, usually half a second; guesses
Cluster = Mapping[str, NodeReading]


def capacity_tokens(node: NodeReading) -> float:
    """Tokens that its pool and the tiers below hold."""
    blocks = sum(node.figures[name] for name in ("num_blocks", "tier_host_capacity", "tier_disk_capacity"))
    return blocks * node.figures["block_size"]


async def read_nodes(url: str, api_key: str = "") -> dict[str, NodeReading]:
    """The figures of each node by node_id. Raises HttpError, OSError, or ValueError for what is no exposition."""
    return shown.read_nodes(await get_text(url, "/metrics", api_key))


async def read_when_still(url: str, api_key: str = "") -> dict[str, NodeReading]:
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
    return {name: (node.figures["busy_s"], node.figures["prompt_tokens"]) for name, node in nodes.items()}


def added(before: Cluster, after: Cluster, counter: str) -> dict[str, float]:
    """The growth of a counter, by node_id. A node that came meanwhile counted from 0, one that left is not known any
    more."""
    return {
        name: node.figures[counter] - (before[name].figures[counter] if name in before else 0.0)
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
