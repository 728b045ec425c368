"""A cluster in virtual time: the router's placement, the directory and its stream are real, the nodes are simulated.

Each simulated node publishes through an `OwnView`; the batches go over the wire format, and through a real Redis when
there is one, into each router's `Mirror`. Routers see statuses once a heartbeat and place with `find_placement`.
Messages take no virtual time, but for what gathers them: heartbeats, and the publisher's flush.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from tandem.deploy.bench.simulated.elastic_router import ElasticRouter, leanings_of
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.leanings import SimulatedLeanings
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.deploy.bench.simulated.router import EPOCH, Router, SimulatedRouter
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.kept import MOST_PEERS, gives_way
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.records import Batch, DirectoryEvent, decode_event, encode

HEARTBEAT_S = 0.5  # engine/contracts/config.py
TICK_S = 0.1  # router/process/worker.py
FLUSH_S = 0.01  # of the directory's publisher

Channel = Callable[[Sequence[Batch]], list[DirectoryEvent]]


def wire_channel(batches: Sequence[Batch]) -> list[DirectoryEvent]:
    """The stream without a Redis: encoded and decoded as on the wire."""
    return [decode_event(encode(batch)) for batch in batches]


class Simulation:
    """One simulation: call `run()` once; then `jobs` holds every request's times and hits, `nodes` the loads."""

    def __init__(self, shape: ClusterShape, policy: PlacementName, channel: Channel = wire_channel) -> None:
        self._peers: dict[str, list[SimulatedNode]] = {}  # whom a node leaves blocks to
        self._by_id: dict[str, SimulatedNode] = {}
        self._sources: dict[Job, SimulatedNode] = {}  # of prompts that decode elsewhere
        # When a node's step ends, or a prompt that was handed over is there.
        self._heap: list[tuple[float, int, SimulatedNode, Job | None]] = []
        self._pushed = 0
        self.nodes = [
            SimulatedNode(
                f"node-{index:03}",
                shape.costs,
                shape.gpu_tokens,
                shape.host_tokens,
                shape.targets,
                role,
                self._claim,
                self._is_left,
            )
            for index, role in enumerate(shape.roles)
        ]
        self.jobs: list[Job] = []
        self._channel = channel
        self._by_id.update({node.node_id: node for node in self.nodes})
        if shape.keeps_once:
            for each in self._by_id:
                behind = sorted(other for other in self._by_id if gives_way(each, other))
                self._peers[each] = [self._by_id[other] for other in behind[:MOST_PEERS]]
        self._owners = {node.node_id: OwnView(NodeKey(node.node_id, EPOCH)) for node in self.nodes}
        self.leanings = SimulatedLeanings(leanings_of(self.nodes, shape))
        self._routers: list[Router] = [
            ElasticRouter(self.nodes, shape, self.leanings)
            if policy == "elastic"
            else SimulatedRouter(policy, index, self.nodes, shape.costs)
            for index in range(shape.num_routers)
        ]
        self._ping = 0
        self._flush_at = self._look_at = math.inf
        self._waiting: list[tuple[Job, Router]] = []
        self._changed: dict[str, SimulatedNode] = {}
        for node in self.nodes:  # the first batch of a node is a reset
            self._publish(node)

    def run(self, requests: Sequence[TraceRequest]) -> None:
        beat_at, index = HEARTBEAT_S, 0
        while index < len(requests) or self._heap or self._waiting:
            arrival = requests[index].arrival_s if index < len(requests) else math.inf
            event_at = self._heap[0][0] if self._heap else math.inf
            now = min(arrival, event_at, beat_at, self._flush_at, self._look_at)
            if now == self._look_at:
                self._look(now)
            elif now == self._flush_at:
                self._flush()
            elif now == event_at:
                self._next_event()
            elif now == beat_at:
                self._beat(now)
                beat_at += HEARTBEAT_S
            else:
                self._arrive(requests[index], index)
                index += 1
                if index == len(requests):
                    for node in self.nodes:
                        node.arrivals_ended(now)

    def _arrive(self, request: TraceRequest, index: int) -> None:
        now = request.arrival_s
        job = Job(request, request.block_hashes(), now)
        self.jobs.append(job)
        self._place(job, self._routers[index % len(self._routers)], now)

    def _look(self, now: float) -> None:
        """Has the routers ask again about jobs that wait."""
        waiting, self._waiting, self._look_at = self._waiting, [], math.inf
        for job, router in waiting:
            self._place(job, router, now)

    def _place(self, job: Job, router: Router, now: float) -> None:
        placing = router.place(job, self._ping, now)
        if placing is None:
            self._waiting.append((job, router))
            self._look_at = min(self._look_at, now + TICK_S)
            return
        job.waited_s = now - job.arrived_at
        nodes = [self._by_id[node_id] for node_id in placing.computing]
        job.peer = self._by_id[placing.peer].cache if placing.peer else None
        job.places = placing.computing
        if nodes != [self._by_id[placing.decoding]]:
            job.decode_on = placing.decoding
            self._sources[job] = nodes[0]
        for node in nodes:
            node.submit(job, now)
            self._goes_on(node, now)

    def _next_event(self) -> None:
        at, _, node, job = heapq.heappop(self._heap)
        if job is not None:
            node.take(job, at)
            self._stores(node, at)
        elif at == node.next_at:  # else something came meanwhile and made the run of steps shorter
            num_done = len(node.done)
            for each in node.advance():
                for router in self._routers:
                    router.first_token(each, at)
            self._stores(node, at)
            if len(node.done) > num_done:
                self._grant(node, at)
            for each in node.computed:
                self._sources[each] = node
                if each.is_granted:
                    self._hand_over(each, at)
            node.computed.clear()
        else:
            return
        self._goes_on(node, at)

    def _goes_on(self, node: SimulatedNode, now: float) -> None:
        """Schedules what a node has begun, and those whose turn it is by that."""
        self._schedule(node)
        for job in node.passed_on():
            for other in [self._by_id[node_id] for node_id in job.places if node_id != node.node_id]:
                other.nudge(job, now)
                self._goes_on(other, now)

    def _stores(self, node: SimulatedNode, now: float) -> None:
        if node.cache.events:
            self._changed[node.node_id] = node
            self._flush_at = min(self._flush_at, now + FLUSH_S)

    def _is_left(self, node_id: str, block_hash: bytes) -> bool:
        return any(block_hash in peer.cache for peer in self._peers.get(node_id, ()))

    # --- hand-offs --------------------------------------------------------------------------------------------

    def _claim(self, job: Job, now: float) -> None:
        sink = self._by_id[job.decode_on]
        job.num_held = sink.num_held(job)
        sink.grants.claim(job)
        self._grant(sink, now)

    def _grant(self, sink: SimulatedNode, now: float) -> None:
        """Lets jobs go on whose turn it is at a node that has room."""
        for job in sink.grants.granted():
            if self._sources[job] is not sink:
                sink.cache.hold(("granted", job), len(job.hashes) - job.num_held // TRACE_BLOCK)
            self._sources[job].link.pushed_late(job, now)
            if job.computed_at:
                self._hand_over(job, now)

    def _hand_over(self, job: Job, now: float) -> None:
        self._push(self._sources[job].link.ready_at(now), self._by_id[job.decode_on], job)

    # --- events -----------------------------------------------------------------------------------------------

    def _schedule(self, node: SimulatedNode) -> None:
        if node.next_at < math.inf:
            self._push(node.next_at, node, None)

    def _push(self, at: float, node: SimulatedNode, job: Job | None) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, node, job))

    def _beat(self, now: float) -> None:
        self._ping += 1
        for node_id in self._peers:
            self._by_id[node_id].cache.give_up_first()
        for node in self.nodes:
            for router in self._routers:
                router.hear(node, self._ping, now)
        for router in self._routers[:1]:  # all would decide alike
            router.heard_all(now)

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
