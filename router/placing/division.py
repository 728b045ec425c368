"""Which nodes that do all work should take streams, and leave prompts to the others. Pure; docs/elastic.md.

Each step of streams reads all weights, however few streams there are. Where that takes much of the time a token, the
first stream on a node takes it from prompts, and the next hardly anything more: so streams go to as few nodes as keep
them in time. At longer times a token that gains less than moving KV costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT
from tandem.router.placing.outlook import Outlook

# The share of a token's time that reading weights takes from which nodes divide.
TIGHT = 0.25  # docs/simulator.md#divisions-by-target
# How full nodes with streams are beside their weights when one more takes streams, and up to which one fewer would do.
FULL, RELIEVED = 0.85, 0.6  # guesses
# What prompts count that are computed beside streams: others can take them; a guess.
PROMPTS_COUNT = 0.5


def _equal(key: NodeKey) -> int:
    return 0


def takers_of_streams(
    nodes: Sequence[Outlook], tpot_s: float, others_compute: bool = False, rank: Callable[[NodeKey], int] = _equal
) -> frozenset[NodeKey] | None:
    """Returns who should take streams so that they are in time; all of them where streams need that many. None: nodes
    need not divide. `others_compute`: whether prompts have nodes besides these. Those with the lowest rank take them,
    then who has most, then names decide, so every router decides alike."""
    weights = max((node.report.least_step_s for node in nodes), default=0.0) / (AIMED_AT * tpot_s) if tpot_s else 0.0
    if not TIGHT <= weights < 1:
        return None
    busy = [node for node in nodes if node.num_streams]
    needed = sum(max(0.0, _used(node, tpot_s) - weights) for node in busy) / (1 - weights)  # in nodes
    num = max(1, math.ceil(needed / FULL))
    if num < len(busy) and needed > RELIEVED * (len(busy) - 1):
        num = len(busy)
    if num >= len(nodes) and not others_compute and needed <= len(nodes):
        num = len(nodes) - 1
    ordered = sorted(nodes, key=lambda node: (rank(node.key), -node.num_streams, node.key))
    return frozenset(node.key for node in ordered[: max(1, num)])


def _used(node: Outlook, tpot_s: float) -> float:
    """The share of a node's time that its streams take, and prompts beside them."""
    return node.report.step_s / (AIMED_AT * tpot_s) + PROMPTS_COUNT * node.report.prompt_share
