"""What lost nodes may still be working on, in case they return. Pure."""

from __future__ import annotations

from tandem.router.placing.view import NodeKey

MAX_LOST_NODES = 64  # a guess

Work = set[tuple[str, int]]  # (request_id, attempt)


class Orphans:
    def __init__(self) -> None:
        self._by_node: dict[NodeKey, Work] = {}

    def lost(self, node: NodeKey, work: Work) -> None:
        """The requests go on elsewhere; `work` is what this epoch of the node had of them."""
        if work:
            self._by_node[node] = work
        if len(self._by_node) > MAX_LOST_NODES:
            del self._by_node[next(iter(self._by_node))]

    def returned(self, node: NodeKey) -> Work:
        """What is to be cancelled there: empty for a new epoch, which knows nothing of the old one's work."""
        known = [key for key in self._by_node if key[0] == node[0]]
        work = {key: self._by_node.pop(key) for key in known}
        return work.get(node, set())
