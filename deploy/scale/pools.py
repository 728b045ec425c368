"""How many nodes each pool should have: what the cluster reports, with bounds and patience. Pure.

A pool grows at once by all that is lacking, since requests wait meanwhile. It shrinks by one node at a time, and when
fewer were enough for `idle_s` without a break: a node takes its cache along, and minutes to come back. None goes to
zero while there is a request anywhere; the first that waits at the router brings one of each back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.router.metrics.nodes import NodeReading

# What fills a node, summed over a pool: the chart's scaling goes by the same (docs/containers.md). Guesses.
PER_NODE = {"num_waiting_tokens": 20_000.0, "kv_used_share": 0.7, "num_waiting": 4.0}
OF_ROLE = {
    "prefill": ("num_waiting_tokens",),
    "decode": ("kv_used_share", "num_waiting"),
    "unified": tuple(PER_NODE),
}
TOLERATED = 0.1  # of a node, that isn't worth another one; as Kubernetes' autoscaler has it
HEADROOM = 0.5  # nodes that may be spare beside what is promised: bursts need them; a guess


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most nodes of a pool."""

    least: int
    most: int

    def within(self, number: int) -> int:
        return min(self.most, max(self.least, number))


@dataclass(frozen=True)
class Seen:
    """What routers showed: nodes, prompts under way and those that no node has, by router the seconds of work for
    prompts by which somebody was late since it began, and nodes' worth of time that what is promised leaves."""

    nodes: Mapping[str, NodeReading]
    num_active: float = 0.0
    num_without_node: float = 0.0
    late_work_s: Mapping[str, float] = field(default_factory=dict)
    spare_nodes: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nobody has anything to do, by those routers that answered and by nodes."""
        at_nodes = (node.figures[key] for node in self.nodes.values() for key in ("num_running", "num_waiting"))
        return not (self.num_active or self.num_without_node or any(at_nodes))


@dataclass
class PoolScaler:
    """Decides the sizes of pools, which go by their roles. `idle_s`: how long fewer nodes must have been enough."""

    bounds: Mapping[str, Bounds]
    idle_s: float
    _enough_since: dict[str, float] = field(default_factory=dict)
    _late_before: tuple[Mapping[str, float], float] = field(default=({}, 0.0))  # late_work_s, and when

    def look(self, seen: Seen, sizes: Mapping[str, int], now: float) -> dict[str, int]:
        """The new sizes of those pools that are to change. `sizes`: what is asked for now, whether it is there or not;
        `now`: monotonic seconds."""
        lacking = self._lacking(seen, now)
        changes = {}
        for role, bounds in self.bounds.items():
            size = sizes[role]
            wanted = 0 if seen.is_idle else max(1, self._wanted(role, seen, size, lacking))
            wanted = bounds.within(wanted)
            if wanted >= size:
                self._enough_since.pop(role, None)
                if wanted > size:
                    changes[role] = wanted
            elif now - self._enough_since.setdefault(role, now) >= self.idle_s:
                self._enough_since[role] = now
                changes[role] = size - 1
        return changes

    def _wanted(self, role: str, seen: Seen, size: int, lacking: float) -> int:
        """How many nodes the load of this pool needs."""
        nodes = [node.figures for node in seen.nodes.values() if node.role == role and not node.figures["draining"]]
        need = max(sum(figures[key] for figures in nodes) / PER_NODE[key] for key in OF_ROLE[role])
        if role == "unified" and (lacking or seen.spare_nodes):
            need = max(need, size + lacking - max(0.0, seen.spare_nodes - HEADROOM))
        return math.ceil(need - TOLERATED)

    def _lacking(self, seen: Seen, now: float) -> float:
        """How many nodes were lacking since the look before: the work by which somebody is late, a second. A router
        that was not seen then, or has begun anew, counts from now."""
        (before, then), self._late_before = self._late_before, (seen.late_work_s, now)
        late_s = sum(max(0.0, late - before.get(router, late)) for router, late in seen.late_work_s.items())
        return late_s / (now - then) if late_s and now > then else 0.0
