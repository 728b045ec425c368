"""A simulated router process: its own views of the nodes, its own mirror of the directory, the product's placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.config import PlacementName, RouterOptions
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.directory.mirror import Mirror, Outcome
from tandem.kv_connector.directory.records import Batch, DirectoryEvent
from tandem.router.placing.placement import PlacementRequest, find_placement
from tandem.router.placing.policies import make_policy
from tandem.router.placing.view import NodeView

EPOCH = 1


class Placing(NamedTuple):
    """Ids of the nodes that compute a prompt, its chunks in turn, that decodes, and that is pulled from ("": none)."""

    computing: tuple[str, ...]
    decoding: str
    peer: str


class Router(Protocol):
    """What a cluster asks of its routers."""

    def take(self, events: Sequence[DirectoryEvent]) -> None: ...

    def hear(self, node: SimulatedNode, ping: int, now: float) -> None:
        """Takes a node's answer to a ping."""

    def heard_all(self, now: float) -> None:
        """Is called when all nodes have answered."""

    def first_token(self, job: Job, now: float) -> None:
        """Is called when a job has its first token."""

    def place(self, job: Job, ping: int, now: float) -> Placing | None:
        """The job's nodes. Views of them count it at once. None: it is to wait, and this to be asked again."""


class SimulatedMirror:
    """A router's copy of the directory: who has how much of a prompt."""

    def __init__(self, nodes: Sequence[SimulatedNode]) -> None:
        self._mirror = Mirror()
        for node in nodes:
            self._mirror.adopt(NodeKey(node.node_id, EPOCH))

    def take(self, events: Sequence[DirectoryEvent]) -> None:
        for event in events:
            assert isinstance(event, Batch)
            assert self._mirror.apply(event) is Outcome.APPLIED, "a batch was lost"

    def cached(self, job: Job) -> dict[NodeKey, int]:
        """Leading prompt tokens, by node."""
        return {owner: TRACE_BLOCK * length for owner, length in self._mirror.longest_prefix(job.hashes).items()}


class SimulatedRouter:
    """Learns of nodes by statuses and by batches of the directory, and places by a policy of the product."""

    def __init__(self, policy: PlacementName, index: int, nodes: Sequence[SimulatedNode], costs: CostModel) -> None:
        self._policy = make_policy(policy, seed=index)
        self._mirror = SimulatedMirror(nodes)
        self._costs = costs
        self._views = {node.node_id: NodeView(_info(node), status_of(node, 0, costs)) for node in nodes}

    def take(self, events: Sequence[DirectoryEvent]) -> None:
        self._mirror.take(events)

    def hear(self, node: SimulatedNode, ping: int, now: float) -> None:
        self._views[node.node_id].note_status(status_of(node, ping, self._costs), now)

    def heard_all(self, now: float) -> None:
        pass

    def first_token(self, job: Job, now: float) -> None:
        pass

    def place(self, job: Job, ping: int, now: float) -> Placing:
        request = PlacementRequest(job.num_prompt_tokens, job.request.num_output_tokens)
        views, cached = list(self._views.values()), self._mirror.cached(job)
        placement = find_placement(request, views, cached, RouterOptions.local_tail_tokens, self._policy, now)
        assert placement is not None
        for choice in placement.choices:
            choice.node.note_placement(ping, choice.num_computed_tokens, 1, now, choice.num_new_tokens)
        computing = placement.prefill or placement.primary
        peer = placement.prefix.peer.node_id if placement.prefix is not None else ""
        return Placing((computing.node_id,), placement.primary.node_id, peer)


def _info(node: SimulatedNode) -> NodeInfo:
    return NodeInfo(node_id=node.node_id, epoch=EPOCH, role=node.role)  # type: ignore[arg-type]


def status_of(node: SimulatedNode, sequence: int, costs: CostModel) -> Status:
    """What the node tells in answer to a heartbeat."""
    return Status(
        node_id=node.node_id,
        epoch=EPOCH,
        sequence=sequence,
        num_running=node.num_running,
        num_waiting=node.num_waiting,
        num_waiting_tokens=node.num_waiting_tokens,
        num_free_blocks=node.num_free_blocks,
        num_blocks=node.num_blocks,
        block_size=TRACE_BLOCK,
        prefill_s_per_token=node.prefill_s_per_token,
        transfer_s_per_token=costs.push_s_per_token if node.role == "prefill" else 0.0,
        fetch_s_per_token=costs.fetch_s_per_token,
    )
