"""Pools of nodes among the launcher's children, whose sizes go by what the cluster reports. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

from tandem.deploy.launch.cluster_plan import ChildPlan, plan_one_more
from tandem.deploy.scale.pools import Bounds, PoolScaler
from tandem.deploy.scale.reading import seen_in

LOOK_S = (
    2.0  # between two looks at the router's metrics; a guess: as often as a node's heartbeats can show something new
)
POOLS = (("prefill", "prefill"), ("decode", "decode"), ("elastic", "unified"))  # options, and roles of their nodes


class ScaledPools:
    """The pools of one launcher. Its nodes are called ROLE-INDEX."""

    def __init__(self, values: Mapping[str, Any], bounds: Mapping[str, Bounds]) -> None:
        self._values, self._bounds = values, bounds
        self._scaler = PoolScaler(bounds, values.get("pool_idle_s", 300.0))
        self._next_look = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ScaledPools | None:
        """The pools that the options let grow or shrink; None: each pool stays as it was started."""
        bounds = {}
        for option, role in POOLS:
            size, most = values.get(option, 0), values.get(f"{option}_max", 0)
            if most:
                bounds[role] = Bounds(min(values.get("pool_min", 1), size), max(size, most))
        return cls(values, bounds) if bounds else None

    def is_due(self, now: float) -> bool:
        """Whether to look again; it is not for a while then."""
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        return True

    def look(
        self, expositions: Mapping[str, str], kept: Sequence[str], taken: Collection[str], now: float
    ) -> tuple[list[ChildPlan], list[str]]:
        """Nodes to add, and names of those to retire. `expositions`: the metrics of each router. `kept`: the children
        but for those that are retired already, whose names, too, are `taken`. Routers that say nothing change
        nothing."""
        names = {role: [name for name in kept if name.rpartition("-")[0] == role] for role in self._bounds}
        try:
            seen = seen_in(expositions)
        except ValueError:
            return [], []
        wanted = self._scaler.look(seen, {role: len(names[role]) for role in names}, now)
        added, retired = [], []
        for role, number in wanted.items():
            free = (index for index in count() if f"{role}-{index}" not in taken)
            added += [plan_one_more(role, next(free), self._values) for _ in range(number - len(names[role]))]
            newest = sorted(names[role], key=lambda name: int(name.rpartition("-")[2]))
            retired += newest[number:]
        return added, retired
