"""Which nodes that do all work should be for prompts first, and which for streams, by what both take now. Pure.

A leaning binds nobody: it is a price in `ElasticPlacement`, below that of anybody who would be late. What is asked of a
node is told by its next status, so several routers decide alike; docs/elastic.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT
from tandem.engine.contracts.wire.work import Leaning, LeaningName
from tandem.router.placing.outlook import Outlook
from tandem.router.placing.view import NodeView

Side = Literal["prefill", "decode"]
BUSY = 0.6  # share of a side's nodes that it must take before anybody leans its way; a guess
GAIN = 0.75  # what the best division leaves of the fuller side's load, at most, for a node to change; a guess
FOREIGN = 1.5  # how much more work counts on nodes that are for the other: it disturbs that; a guess
HOLDS_S = 1.0  # how long a change must have been worth it: bursts pass; a guess
SETTLES_S = 3.0  # after a change of some node, until the next of any: work has to follow first; a guess


class Demand(NamedTuple):
    """What prompts and streams take, in nodes."""

    prefill: float
    decode: float


def demand_of(node: Outlook, now: float) -> Demand:
    """What both kinds of work on a node take of it; above 1: more than it has."""
    report = node.report
    ttft_s, tpot_s = report.targets.ttft_s, report.targets.tpot_s
    waits = node.backlog_s(now) / ttft_s if ttft_s else 0.0
    streams = report.step_s / (AIMED_AT * tpot_s) if tpot_s and report.num_streams else 0.0
    return Demand(max(report.prompt_share, waits), streams)


def load(demand: Demand, num_prefill: int, num_decode: int) -> float:
    """How full the fuller side is when so many nodes, at least one, are for each. What no node is for the others do."""
    if num_prefill and num_decode:
        return max(demand.prefill / num_prefill, demand.decode / num_decode)
    own, foreign = demand if num_prefill else demand[::-1]
    return (own + FOREIGN * foreign) / (num_prefill + num_decode)


def better_side(demand: Demand, num_prefill: int, num_decode: int) -> Side | None:
    """The side that one more node should be on, on the way to the best division; None: neither."""
    num, full = num_prefill + num_decode, load(demand, num_prefill, num_decode) if num_prefill + num_decode else 0.0
    if full < BUSY:
        return None
    loads = [load(demand, each, num - each) for each in range(num + 1)]
    best = loads.index(min(loads))
    if best == num_prefill or loads[best] > GAIN * full:
        return None
    return "prefill" if best > num_prefill else "decode"


class Candidate(NamedTuple):
    """A node that is for some work first."""

    outlook: Outlook
    side: Side
    is_free: bool  # whether demand may change it
    for_s: float  # so long


class LeaningPolicy:
    """Decides which nodes lean another way; it is asked at every heartbeat."""

    def __init__(self) -> None:
        self._worth_since: tuple[Side, float] | None = None

    def change(self, nodes: Sequence[Candidate], now: float) -> tuple[NodeKey, Leaning] | None:
        """Which node should lean the other way now, and how; None: all is well, or nothing is sure yet."""
        demands = {node.outlook.key: demand_of(node.outlook, now) for node in nodes}
        demand = Demand(sum(d.prefill for d in demands.values()), sum(d.decode for d in demands.values()))
        num_prefill = sum(node.side == "prefill" for node in nodes)
        side = better_side(demand, num_prefill, len(nodes) - num_prefill)
        others = [node for node in nodes if node.is_free and node.side != side]
        if side is None or not others:
            self._worth_since = None
            return None
        if self._worth_since is None or self._worth_since[0] != side:
            self._worth_since = side, now
        has_settled = all(node.for_s >= SETTLES_S for node in nodes if node.is_free)
        if now - self._worth_since[1] < HOLDS_S or not has_settled:
            return None
        self._worth_since = None
        # The one that has least of the work that it would give up.
        node = min(others, key=lambda node: (getattr(demands[node.outlook.key], node.side), node.outlook.key))
        return node.outlook.key, Leaning(side, why=_why(demand, num_prefill, len(nodes)))


def candidates(nodes: Sequence[NodeView]) -> list[Candidate]:
    """Nodes that are for some work first, by their role or their leaning."""
    found = []
    for node in nodes:
        said, side = node.status.leaning, node.leaning
        if node.usable and node.outlook is not None and side != "unified":
            is_free = node.role == "unified" and not said.is_pinned
            found.append(Candidate(node.outlook, "prefill" if side == "prefill" else "decode", is_free, said.for_s))
    return found


def wished(role: LeaningName) -> Leaning:
    """What an operator asks for; "unified": whatever demand asks for."""
    return Leaning(role, is_pinned=role != "unified", why="an operator's wish")


def _why(demand: Demand, num_prefill: int, num_nodes: int) -> str:
    taken = f"prompts took {demand.prefill:.2f} nodes and streams {demand.decode:.2f}"
    return f"{taken}, with {num_prefill} of {num_nodes} for prompts"
