"""What a scaler sees of a cluster: the `/metrics` of its routers, each of which sums over its processes and needs no
key. Each router knows of its own requests alone, so all of them are asked."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.deploy.scale.pools import Seen
from tandem.router.metrics.nodes import NodeReading, read_nodes


def seen_in(expositions: Mapping[str, str]) -> Seen:
    """What these expositions show of a cluster. They are by the routers' names; one that did not answer has "" and
    counts for nothing. Raises ValueError where none did, and for text that is no router's."""

    def figures(name: str) -> list[float]:
        return [float(found[1]) for text in shown.values() for found in re.finditer(_line(name), text, re.MULTILINE)]

    shown = {router: text for router, text in expositions.items() if text}
    if not shown or not all("tandem_router_active_prompts " in text for text in shown.values()):
        raise ValueError("these are not the metrics of a router")
    nodes: dict[str, NodeReading] = {}
    late_work_s = {}
    for router, text in shown.items():
        nodes |= read_nodes(text)  # all routers show the same nodes
        if late := re.search(_line("late_work_seconds_total"), text, re.MULTILINE):
            late_work_s[router] = float(late[1])
    without_node, spare = sum(figures("waiting_prompts")), min(figures("spare_nodes"), default=0.0)
    return Seen(nodes, sum(figures("active_prompts")), without_node, late_work_s, spare)


def _line(name: str) -> str:
    return rf"^tandem_router_{name} (\S+)$"
