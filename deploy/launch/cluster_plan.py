"""Plans the children of `tandem serve` and their command lines. Pure, but for counting GPUs and finding ports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.deploy.command_line.flags import to_arguments, to_environment
from tandem.deploy.options import NODE_OPTIONS, ROUTER_OPTIONS, Values, select
from tandem.deploy.redis_server import free_port
from tandem.engine.contracts.errors import ConfigError

NODES, ROUTER = 0, 1  # stages
# Not `python -m`, which would put the working directory on sys.path, where a folder may shadow a package.
PROGRAM = "import sys; sys.path.remove(''); from tandem.deploy.cli import main; sys.exit(main())"
_NOT_FOR_NODES = (
    "host", "port", "prefill", "decode", "elastic", "fixed_roles", "prefill_tensor_parallel_size",
    "decode_tensor_parallel_size", "leaning",
)  # fmt: skip


@dataclass(frozen=True)
class ChildPlan:
    """One child. `connects_to` names children whose address it needs, `node_id` is the stem of its id. Command lines
    are for everybody to see, so what is secret goes into `environment`."""

    name: str
    stage: int
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    node_id: str = ""
    connects_to: tuple[str, ...] = ()
    is_local: bool = True  # it runs on the launcher's host
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_single_node(values: Mapping[str, Any]) -> list[ChildPlan]:
    """A unified node, and a router that is given its address."""
    (node,) = _plan_nodes(["unified"], {**values, "redis_url": ""})
    router = {**values, "redis_url": ""}
    return [node, _child("router", ROUTER, "router", ROUTER_OPTIONS, router, connects_to=(node.name,))]


def plan_cluster(values: Mapping[str, Any], redis_url: str) -> list[ChildPlan]:
    """Prefill and decode nodes, nodes that do all, and a router that discovers them through Redis. It is given their
    addresses, too: when started again while Redis does not answer, it would find nobody. Raises ConfigError."""
    if values.get("transport") == "local":
        raise ConfigError(
            "--transport local moves KV inside one process, and these nodes are processes of their own: choose auto, "
            "or shm (CPU), cuda_ipc (GPU), nixl or tcp"
        )
    shared = _placed({**values, "redis_url": redis_url})
    nodes = _plan_nodes(_roles(values), shared)
    names = tuple(node.name for node in nodes)
    return [*nodes, _child("router", ROUTER, "router", ROUTER_OPTIONS, shared, connects_to=names)]


def plan_on_ray(values: Mapping[str, Any]) -> list[ChildPlan]:
    """Nodes on the hosts of a Ray cluster, each with what Ray gives it; a router here and `ray_routers` there, the i-th
    on `--port` + i, since two may share a host. All discover nodes through Redis."""
    values = _placed(values)
    if _group_size(values) > 1:
        raise ConfigError("--data-parallel-size with --enable-expert-parallel: on one host alone; leave --ray out")
    plans = _plan_nodes(_roles(values), values, is_local=False)
    plans.append(_child("router", ROUTER, "router", ROUTER_OPTIONS, values))
    for index in range(1, values.get("ray_routers", 0) + 1):
        own = {name: value for name, value in values.items() if name != "host"} | {"port": values["port"] + index}
        plans.append(_child(f"router-{index}", ROUTER, "router", ROUTER_OPTIONS, own, is_local=False))
    return plans


def plan_one_more(role: str, index: int, values: Mapping[str, Any]) -> ChildPlan:
    """A further node of a Ray cluster, as those of `plan_on_ray`."""
    (plan,) = _plan_nodes([role], _placed(values), is_local=False)
    name = f"{role}-{index}"
    return replace(plan, name=name, node_id=name)


def _roles(values: Mapping[str, Any]) -> list[str]:
    kinds = (("prefill", "prefill"), ("decode", "decode"), ("elastic", "unified"))
    roles = [role for option, role in kinds for _ in range(values.get(option, 0))] or ["unified"]
    return [role for role in roles for _ in range(values.get("data_parallel_size", 1))]


def _group_size(values: Mapping[str, Any]) -> int:
    """How many nodes share experts out; neighbours do."""
    size: int = values.get("data_parallel_size", 1)
    return size if values.get("enable_expert_parallel") else 1


def _places_in_groups(num_nodes: int, values: Mapping[str, Any]) -> list[Values]:
    """The options that give each node its place among those with which it shares experts out."""
    size, given = _group_size(values), values.get("data_parallel_rpc_port", 0)
    if size == 1:
        return [{"data_parallel_size": 1}] * num_nodes
    ports = [given + group if given else free_port() for group in range(num_nodes // size)]
    return [{"data_parallel_rank": i % size, "data_parallel_rpc_port": ports[i // size]} for i in range(num_nodes)]


def _placed(values: Mapping[str, Any]) -> Values:
    """The same values with the placement that nodes which do all work need, unless another one is named."""
    is_elastic = values.get("elastic") or not values.get("fixed_roles", True)
    return {**({"placement": "elastic"} if is_elastic else {}), **values}


def _plan_nodes(roles: list[str], values: Mapping[str, Any], is_local: bool = True) -> list[ChildPlan]:
    num_gpus = count_gpus() if is_local and values.get("device") != "cpu" else 0
    plans, ranks = [], [num_ranks(role, values) for role in roles]
    places = _places_in_groups(len(roles), values)
    if _group_size(values) > 1 and 0 < num_gpus < len(roles):
        raise ConfigError(f"{len(roles)} nodes that share experts out take a GPU each, and {num_gpus} are visible")
    for index, role in enumerate(roles):
        own = {name: value for name, value in values.items() if name not in _NOT_FOR_NODES}
        if is_local:
            own |= share_of_machine(index, ranks, num_gpus, os.cpu_count() or 1, own)
        own |= {"tensor_parallel_size": ranks[index], **places[index]}
        name, command = f"{role}-{index - roles.index(role)}", role
        if role != "unified" and not values.get("fixed_roles", True):
            command, own["leaning"] = "unified", role
        plans.append(_child(name, NODES, command, NODE_OPTIONS, own, node_id=name, is_local=is_local))
    return plans


def num_ranks(role: str, values: Mapping[str, Any]) -> int:
    """GPUs of each node of that role."""
    every: int = values.get("tensor_parallel_size", 1)
    return values.get(f"{role}_tensor_parallel_size", 0) or every


def share_of_machine(
    index: int, num_ranks: Sequence[int], num_gpus: int, num_cores: int, values: Mapping[str, Any]
) -> Values:
    """The options that give node `index` its share of the machine; `num_ranks` has the ranks of each node. GPUs go
    round; nodes of one GPU that share it share its memory, nodes without one share the cores. Raises ConfigError where
    there are too few GPUs."""
    num_nodes = len(num_ranks)
    if num_gpus == 0:
        if num_nodes == 1 or values.get("num_threads"):
            return {}
        return {"num_threads": max(1, num_cores // num_nodes)}
    if max(num_ranks) > 1:
        if sum(num_ranks) > num_gpus:
            raise ConfigError(f"nodes of {' + '.join(map(str, num_ranks))} GPUs, but {num_gpus} are visible")
        return {"device_index": sum(num_ranks[:index])}
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
    own = select(options, values)
    return ChildPlan(
        name, stage, program, tuple(to_arguments(options, own)), environment=to_environment(options, own), **more
    )
