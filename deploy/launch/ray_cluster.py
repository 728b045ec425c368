"""A Ray cluster on whose hosts `tandem serve --ray` runs nodes and further routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.deploy.launch.child_process import ChildProcess, RunningChild
from tandem.deploy.launch.cluster_plan import NODES, ChildPlan, num_ranks
from tandem.deploy.launch.ray_child import RayChild, RemoteParent
from tandem.engine.contracts.errors import ConfigError


class RayCluster:
    """A connection to a Ray cluster, as a context manager. Raises ConfigError without Ray, or when no cluster
    answers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._places: dict[str, Any] = {}  # a scheduling strategy for each node
        self._groups: list[Any] = []
        try:
            import ray
        except ImportError:
            raise ConfigError("--ray needs Ray, here and on its hosts: pip install 'tandem-serve[ray]'") from None
        try:
            ray.init(address=values["ray"], log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster answers at --ray {values['ray']}: {error}") from None
        self._ray = ray
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and values.get("device") != "cpu"
        self._takes_gpus = has_gpus or values.get("device") == "cuda"

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()

    def reserve(self, plans: Sequence[ChildPlan]) -> None:
        """Reserves a place for each node, without waiting for it. A node's GPUs are one bundle, so of one host; the
        prefill and the decode node of equal number are one group, near each other where there is room."""
        pairs: dict[str, list[ChildPlan]] = {}
        for plan in plans:
            if plan.stage == NODES:
                pairs.setdefault(plan.name.rpartition("-")[2], []).append(plan)
        for nodes in pairs.values():
            group = self._ray.util.placement_group([self._bundle(plan) for plan in nodes], strategy="PACK")
            self._groups.append(group)
            for index, plan in enumerate(nodes):
                self._places[plan.name] = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                )

    def start(self, plan: ChildPlan, arguments: Sequence[str], write: Callable[[str, str], None]) -> RunningChild:
        if plan.is_local:
            return ChildProcess(plan.name, plan.command, arguments, plan.environment, write)
        if plan.stage == NODES and plan.name not in self._places:  # one that came later
            self.reserve([plan])
        bundle = self._bundle(plan)
        kind = self._ray.remote(RemoteParent).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=self._places.get(plan.name, "SPREAD"),
        )
        actor = kind.remote(plan.name, list(plan.command), list(arguments), dict(plan.environment))
        return RayChild(plan.name, actor, write)

    def forget(self, name: str) -> None:
        """Gives a node's place back; that of a pair, when neither is left."""
        place = self._places.pop(name, None)
        if place is None or any(other.placement_group is place.placement_group for other in self._places.values()):
            return
        self._groups.remove(place.placement_group)
        self._ray.util.remove_placement_group(place.placement_group)

    def _bundle(self, plan: ChildPlan) -> dict[str, int]:
        role = plan.name.rpartition("-")[0]
        return {
            "CPU": 1,
            **({"GPU": num_ranks(role, self._values)} if self._takes_gpus and plan.stage == NODES else {}),
        }
