"""What lost nodes may still be working on, in case they return. Pure."""

from __future__ import annotations

from tandem.engine.contracts.keys import AttemptKey, NodeKey

MAX_LOST_NODES = 64  # a guess


class Orphans:
    """The attempts that lost nodes had, by node, for the newest MAX_LOST_NODES of them."""

    def __init__(self) -> None:
        self._by_node: dict[NodeKey, set[AttemptKey]] = {}

    def lost(self, node: NodeKey, work: set[AttemptKey]) -> None:
        """Remembers the `work` that this epoch of a lost node had. Its requests go on elsewhere."""
        if work:
            self._by_node[node] = work
        if len(self._by_node) > MAX_LOST_NODES:
            del self._by_node[next(iter(self._by_node))]

    def returned(self, node: NodeKey) -> set[AttemptKey]:
        """What is to be cancelled there: empty for a new epoch, which knows nothing of the old one's work."""
        known = [key for key in self._by_node if key.node_id == node.node_id]
        work = {key: self._by_node.pop(key) for key in known}
        return work.get(node, set())
