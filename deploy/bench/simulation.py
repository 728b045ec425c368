"""A cluster in virtual time: the router's placement, the directory and its stream are real, the nodes are simulated.

Each simulated node publishes through an `OwnView`; the batches go over the wire format, and through a real Redis when
there is one, into each router's `Mirror`. Routers see statuses once a heartbeat and place with `find_placement`.
Messages take no virtual time, but for what gathers them: heartbeats, and the publisher's flush.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.simulated_node import CostModel, Job, SimulatedNode
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NO_TARGETS, NodeInfo, Targets
from tandem.kv_connector.directory.mirror import Mirror, Outcome
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.records import Batch, DirectoryEvent, decode_event, encode
from tandem.router.placing.placement import PlacementRequest, find_placement
from tandem.router.placing.policies import make_policy
from tandem.router.placing.view import NodeView

HEARTBEAT_S = 0.5  # engine/contracts/config.py
FLUSH_S = 0.01  # of the directory's publisher
EPOCH = 1

Channel = Callable[[Sequence[Batch]], list[DirectoryEvent]]


def wire_channel(batches: Sequence[Batch]) -> list[DirectoryEvent]:
    """The stream without a Redis: encoded and decoded as on the wire."""
    return [decode_event(encode(batch)) for batch in batches]


@dataclass(frozen=True)
class ClusterShape:
    """What is simulated: the nodes' number, memory and speed, and the router processes before them."""

    num_nodes: int
    gpu_tokens: int  # of KV, a node
    host_tokens: int
    num_routers: int = 1
    costs: CostModel = field(default_factory=CostModel)
    targets: Targets = NO_TARGETS  # that the nodes keep


class _Router:
    """One router process: its own views, mirror and policy."""

    def __init__(self, policy: PlacementName, index: int, nodes: Sequence[SimulatedNode]) -> None:
        self.policy = make_policy(policy, seed=index)
        self.mirror = Mirror()
        self.views = {node.node_id: NodeView(_info(node), _status(node, 0, 0.0)) for node in nodes}
        for node in nodes:
            self.mirror.adopt(NodeKey(node.node_id, EPOCH))

    def take(self, events: Sequence[DirectoryEvent]) -> None:
        for event in events:
            assert isinstance(event, Batch)
            assert self.mirror.apply(event) is Outcome.APPLIED, "a batch was lost"

    def place(self, job: Job, ping: int, now: float) -> str:
        """The node's id; its view counts the job at once."""
        found = self.mirror.longest_prefix(job.hashes)
        cached: dict[NodeKey, int] = {owner: TRACE_BLOCK * length for owner, length in found.items()}
        request = PlacementRequest(job.request.num_prompt_tokens, job.request.num_output_tokens)
        placement = find_placement(request, list(self.views.values()), cached, 0, self.policy, now)
        assert placement is not None
        (choice,) = placement.choices
        choice.node.note_placement(ping, choice.num_computed_tokens, 1, now, choice.num_new_tokens)
        job.num_fetched_tokens = choice.num_fetched_tokens
        return choice.node.info.node_id


class Simulation:
    """`run()` once; then `jobs` holds every request's times and hits, `nodes` the loads."""

    def __init__(self, shape: ClusterShape, policy: PlacementName, channel: Channel = wire_channel) -> None:
        self.nodes = [
            SimulatedNode(f"node-{index:03}", shape.costs, shape.gpu_tokens, shape.host_tokens, shape.targets)
            for index in range(shape.num_nodes)
        ]
        self.jobs: list[Job] = []
        self._channel = channel
        self._by_id = {node.node_id: node for node in self.nodes}
        self._owners = {node.node_id: OwnView(NodeKey(node.node_id, EPOCH)) for node in self.nodes}
        self._routers = [_Router(policy, index, self.nodes) for index in range(shape.num_routers)]
        self._fetch_s_per_token = shape.costs.fetch_s_per_token
        self._heap: list[tuple[float, int, SimulatedNode]] = []  # when a node's step ends
        self._pushed = 0
        self._ping = 0
        self._flush_at = math.inf
        self._changed: dict[str, SimulatedNode] = {}
        for node in self.nodes:  # the first batch of a node is a reset
            self._publish(node)

    def run(self, requests: Sequence[TraceRequest]) -> None:
        beat_at, index = HEARTBEAT_S, 0
        while index < len(requests) or self._heap:
            arrival = requests[index].arrival_s if index < len(requests) else math.inf
            step_at = self._heap[0][0] if self._heap else math.inf
            now = min(arrival, step_at, beat_at, self._flush_at)
            if now == self._flush_at:
                self._flush()
            elif now == step_at:
                self._step()
            elif now == beat_at:
                self._beat(now)
                beat_at += HEARTBEAT_S
            else:
                self._arrive(requests[index], index)
                index += 1

    def _arrive(self, request: TraceRequest, index: int) -> None:
        now = request.arrival_s
        job = Job(request, request.block_hashes(), now)
        self.jobs.append(job)
        node = self._by_id[self._routers[index % len(self._routers)].place(job, self._ping, now)]
        node.submit(job, now)
        self._schedule(node)

    def _step(self) -> None:
        at, _, node = heapq.heappop(self._heap)
        if at != node.next_at:
            return  # a prompt came meanwhile and made the run of steps shorter
        node.advance()
        self._schedule(node)
        if node.cache.events:
            self._changed[node.node_id] = node
            self._flush_at = min(self._flush_at, at + FLUSH_S)

    def _schedule(self, node: SimulatedNode) -> None:
        if node.next_at < math.inf:
            self._pushed += 1
            heapq.heappush(self._heap, (node.next_at, self._pushed, node))

    def _beat(self, now: float) -> None:
        self._ping += 1
        for node in self.nodes:
            status = _status(node, self._ping, self._fetch_s_per_token)
            for router in self._routers:
                router.views[node.node_id].note_status(status, now)

    def _flush(self) -> None:
        self._flush_at = math.inf
        for node in self._changed.values():
            self._publish(node)
        self._changed.clear()

    def _publish(self, node: SimulatedNode) -> None:
        view = self._owners[node.node_id]
        view.record(node.cache.drain_events())
        if view.has_pending():
            events = self._channel(view.number(view.take()))
            for router in self._routers:
                router.take(events)


def _info(node: SimulatedNode) -> NodeInfo:
    return NodeInfo(node_id=node.node_id, epoch=EPOCH, role="unified")


def _status(node: SimulatedNode, sequence: int, fetch_s_per_token: float) -> Status:
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
        fetch_s_per_token=fetch_s_per_token,
    )
