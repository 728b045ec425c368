"""What a scaler sees of a cluster: a router's `/metrics`, which sums over its processes and needs no key."""

from __future__ import annotations

import re

from tandem.deploy.scale.pools import Seen
from tandem.router.metrics.nodes import read_nodes


def seen_in(exposition: str) -> Seen:
    """Raises ValueError for text that is no router's exposition."""

    def figure(name: str) -> float:
        found = re.search(rf"^tandem_router_{name} (\S+)$", exposition, re.MULTILINE)
        return float(found[1]) if found else 0.0

    if "tandem_router_active_prompts " not in exposition:
        raise ValueError("these are not the metrics of a router")
    return Seen(
        read_nodes(exposition),
        figure("active_prompts"),
        figure("waiting_prompts"),
        figure("late_work_seconds_total"),
        figure("spare_nodes"),
    )
