"""What a fleet lacks, or has too much of, as numbers that an autoscaler can read. Pure; docs/elastic.md."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tandem.engine.contracts.rate import AIMED_AT
from tandem.router.placing.elastic import Plan
from tandem.router.placing.outlook import Outlook

MEMORY_S = 60.0  # over which what is spare is averaged: bursts come every few seconds; a guess


class FleetNeed:
    """One router process's figures. `late_work_s` counts the seconds of nodes' work for prompts by which somebody is
    late: so many more a second, so many nodes lack. `spare_nodes` is what nodes have left beside what is promised."""

    def __init__(self) -> None:
        self.late_work_s = self.spare_nodes = 0.0
        self._share, self._looked_at = 0.0, -math.inf  # a node's, on average

    def placed(self, plan: Plan | None) -> None:
        if plan is not None and plan.num_late:
            self.late_work_s += plan.share_s * len(plan.computing)

    def look(self, nodes: Iterable[Outlook | None], now: float) -> None:
        """Looks at all nodes, which report their work or don't: those have nothing to spare."""
        shares = [spare_share(node, now) for node in nodes if node is not None]
        if shares:
            weight = -math.expm1(-max(0.0, now - self._looked_at) / MEMORY_S)
            self._share += weight * (sum(shares) / len(shares) - self._share)
            self._looked_at = now
        self.spare_nodes = self._share * len(shares)

    def figures(self) -> dict[str, float]:
        return {"late_work_seconds": self.late_work_s, "spare_nodes": self.spare_nodes}


def spare_share(node: Outlook, now: float) -> float:
    """The share of a node that neither the streams there nor the prompts need to be in time, 0 to 1."""
    report = node.report
    ttft_s, tpot_s = report.targets.ttft_s, report.targets.tpot_s
    streams = report.step_s / (AIMED_AT * tpot_s) if tpot_s and report.num_streams else 0.0
    prompts = node.backlog_s(now) / ttft_s if ttft_s else 0.0
    return max(0.0, 1 - streams - prompts)
