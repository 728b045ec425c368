"""Which children `tandem serve` has and what their command lines say. Pure, but for counting GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.deploy.options import NODE_OPTIONS, ROUTER_OPTIONS, Values, select, to_arguments

NODES, ROUTER = 0, 1  # stages
# Not `python -m`, which would put the working directory on sys.path, where a folder may shadow a package.
PROGRAM = "import sys; sys.path.remove(''); from tandem.deploy.cli import main; sys.exit(main())"
_NOT_FOR_NODES = ("host", "port", "prefill", "decode")


@dataclass(frozen=True)
class ChildPlan:
    """One child. `connects_to` names children whose address it needs, `node_id` is the stem of its id."""

    name: str
    stage: int
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    node_id: str = ""
    connects_to: tuple[str, ...] = field(default=())


def plan_single_node(values: Mapping[str, Any]) -> list[ChildPlan]:
    """A unified node, and a router that is given its address."""
    (node,) = _plan_nodes(["unified"], {**values, "redis_url": ""})
    router = {**values, "redis_url": ""}
    return [node, _child("router", ROUTER, "router", ROUTER_OPTIONS, router, connects_to=(node.name,))]


def plan_cluster(values: Mapping[str, Any], redis_url: str) -> list[ChildPlan]:
    """Prefill and decode nodes and a router that discovers them through Redis."""
    roles = ["prefill"] * values["prefill"] + ["decode"] * values["decode"]
    shared = {**values, "redis_url": redis_url}
    return [*_plan_nodes(roles, shared), _child("router", ROUTER, "router", ROUTER_OPTIONS, shared)]


def _plan_nodes(roles: list[str], values: Mapping[str, Any]) -> list[ChildPlan]:
    num_gpus = 0 if values.get("device") == "cpu" else count_gpus()
    plans = []
    for index, role in enumerate(roles):
        own = {name: value for name, value in values.items() if name not in _NOT_FOR_NODES}
        own |= share_of_machine(index, len(roles), num_gpus, os.cpu_count() or 1, own)
        name = f"{role}-{index - roles.index(role)}"
        plans.append(_child(name, NODES, role, NODE_OPTIONS, own, node_id=name))
    return plans


def share_of_machine(index: int, num_nodes: int, num_gpus: int, num_cores: int, values: Mapping[str, Any]) -> Values:
    """GPUs go round; nodes that share a GPU share its memory, nodes without one share the cores."""
    if num_gpus == 0:
        if num_nodes == 1 or values.get("num_threads"):
            return {}
        return {"num_threads": max(1, num_cores // num_nodes)}
    share: Values = {"device_index": index % num_gpus}
    num_sharing = len(range(index % num_gpus, num_nodes, num_gpus))
    if num_sharing > 1:
        whole = values.get("gpu_memory_utilization", NODE_OPTIONS["gpu_memory_utilization"].default)
        share["gpu_memory_utilization"] = round(whole / num_sharing, 4)
    return share


def count_gpus() -> int:
    """GPUs that children will see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _child(name: str, stage: int, command: str, options: Mapping[str, Any], values: Values, **more: Any) -> ChildPlan:
    program = (sys.executable, "-c", PROGRAM, command)
    return ChildPlan(name, stage, program, tuple(to_arguments(options, select(options, values))), **more)
