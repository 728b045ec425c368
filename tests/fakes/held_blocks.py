"""How many blocks a node's sequences hold."""

from __future__ import annotations

from in_process_cluster import Node


def most_held(node: Node) -> list[int]:
    """The most blocks that are held at once, window blocks included, written down from now on."""
    state, most = node.process.logic.scheduler.state, [0]
    slide = state.kv.slide

    def noted(requests):  # type: ignore[no-untyped-def]
        slide(requests)
        most[0] = max(most[0], state.pool.num_blocks - state.pool.num_free)

    state.kv.slide = noted  # type: ignore[method-assign]
    return most
