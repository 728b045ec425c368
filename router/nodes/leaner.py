"""Has nodes lean as the policy decides. One per router process, on its event loop."""

from __future__ import annotations

import logging

from tandem.engine.contracts.wire.operate import Lean
from tandem.router.nodes.cluster import Cluster
from tandem.router.placing.leaning import LeaningPolicy, candidates

logger = logging.getLogger(__name__)


class Leaner:
    """Asks the nodes of a cluster to lean."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._policy = cluster, LeaningPolicy()

    def tick(self, now: float) -> None:
        if not self._cluster.is_elastic:
            return
        change = self._policy.change(candidates(self._cluster.serving()), now)
        if change is not None:
            key, leaning = change
            logger.info("%s is to be for %s first: %s", key.node_id, leaning.role, leaning.why)
            self._cluster.send(key, Lean(leaning=leaning), now)
