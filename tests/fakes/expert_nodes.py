"""Nodes that share a model's experts out, in one process or in one each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from node_child import NodeChild

from in_process_cluster import Node, node_options
from tandem.deploy.redis_server import free_port


def start_group(role: str, model: Path, size: int = 2, **changes: object) -> list[Node]:
    """All nodes of a group, in the order of their ranks: each waits for the others as it starts."""
    port = free_port()

    def start(rank: int) -> Node:
        place = {"data_parallel_size": size, "data_parallel_rank": rank, "data_parallel_rpc_port": port}
        return Node(node_options(role, model, enable_expert_parallel=True, **place, **changes))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))


def stop_group(nodes: list[Node]) -> None:
    """Drains all at once, since each takes part in the others' steps until all are done."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        list(threads.map(Node.stop, nodes))


@contextmanager
def group_of(role: str, model: Path, size: int = 2, **changes: object) -> Iterator[list[Node]]:
    nodes = start_group(role, model, size, **changes)
    try:
        yield nodes
    finally:
        stop_group(nodes)


def start_children(role: str, model: str, size: int = 2, transport: str = "auto", **changes: object) -> list[NodeChild]:
    """The same, each in a process of its own and on a GPU of its own where they are on GPUs."""
    port = free_port()

    def start(rank: int) -> NodeChild:
        place = {"data_parallel_size": size, "data_parallel_rank": rank, "data_parallel_rpc_port": port}
        index = rank if changes.get("device") == "cuda" else 0
        more = {"enable_expert_parallel": True, "device_index": index, **place, **changes}
        return NodeChild((role,), transport, model=model, **more)  # type: ignore[arg-type]

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))
