"""A cluster in virtual time: the router's placement, the directory and its stream are real, the nodes are simulated.

Each simulated node publishes through an `OwnView`; the batches go over the wire format, and through a real Redis when
there is one, into each router's `Mirror`. Routers see statuses once a heartbeat and place with `find_placement`.
Messages take no virtual time, but for what gathers them: heartbeats, and the publisher's flush.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.deploy.bench.simulated.router import EPOCH, SimulatedRouter, status_of
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import TraceRequest
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.records import Batch, DirectoryEvent, decode_event, encode

HEARTBEAT_S = 0.5  # engine/contracts/config.py
FLUSH_S = 0.01  # of the directory's publisher

Channel = Callable[[Sequence[Batch]], list[DirectoryEvent]]


def wire_channel(batches: Sequence[Batch]) -> list[DirectoryEvent]:
    """The stream without a Redis: encoded and decoded as on the wire."""
    return [decode_event(encode(batch)) for batch in batches]


class Simulation:
    """`run()` once; then `jobs` holds every request's times and hits, `nodes` the loads."""

    def __init__(self, shape: ClusterShape, policy: PlacementName, channel: Channel = wire_channel) -> None:
        self._by_id: dict[str, SimulatedNode] = {}
        self.nodes = [
            SimulatedNode(
                f"node-{index:03}",
                shape.costs,
                shape.gpu_tokens,
                shape.host_tokens,
                shape.targets,
                role,
                self._claim,
            )
            for index, role in enumerate(shape.roles)
        ]
        self.jobs: list[Job] = []
        self._channel = channel
        self._by_id.update({node.node_id: node for node in self.nodes})
        self._owners = {node.node_id: OwnView(NodeKey(node.node_id, EPOCH)) for node in self.nodes}
        self._routers = [SimulatedRouter(policy, index, self.nodes) for index in range(shape.num_routers)]
        self._costs = shape.costs
        # When a node's step ends, or a prompt that was handed over is there.
        self._heap: list[tuple[float, int, SimulatedNode, Job | None]] = []
        self._pushed = 0
        self._ping = 0
        self._flush_at = math.inf
        self._changed: dict[str, SimulatedNode] = {}
        self._sources: dict[Job, SimulatedNode] = {}  # of prompts that decode elsewhere
        for node in self.nodes:  # the first batch of a node is a reset
            self._publish(node)

    def run(self, requests: Sequence[TraceRequest]) -> None:
        beat_at, index = HEARTBEAT_S, 0
        while index < len(requests) or self._heap:
            arrival = requests[index].arrival_s if index < len(requests) else math.inf
            event_at = self._heap[0][0] if self._heap else math.inf
            now = min(arrival, event_at, beat_at, self._flush_at)
            if now == self._flush_at:
                self._flush()
            elif now == event_at:
                self._next_event()
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
        router = self._routers[index % len(self._routers)]
        computing, decoding, peer = router.place(job, self._ping, now)
        node = self._by_id[computing]
        job.peer = self._by_id[peer].cache if peer else None
        if decoding != computing:
            job.decode_on = decoding
            self._sources[job] = node
        node.submit(job, now)
        self._schedule(node)

    def _next_event(self) -> None:
        at, _, node, job = heapq.heappop(self._heap)
        if job is not None:
            node.take(job, at)
            self._stores(node, at)
        elif at == node.next_at:  # else something came meanwhile and made the run of steps shorter
            num_done = len(node.done)
            node.advance()
            self._stores(node, at)
            for each in node.done[num_done:]:
                self._gave_back(node, each, at)
            for each in node.computed:
                if each.is_granted:
                    self._hand_over(each, at)
            node.computed.clear()
        else:
            return
        self._schedule(node)

    def _stores(self, node: SimulatedNode, now: float) -> None:
        if node.cache.events:
            self._changed[node.node_id] = node
            self._flush_at = min(self._flush_at, now + FLUSH_S)

    # --- hand-offs --------------------------------------------------------------------------------------------

    def _claim(self, job: Job) -> None:
        sink = self._by_id[job.decode_on]
        job.num_held = sink.num_held(job)
        sink.grants.claim(job)
        for granted in sink.grants.granted():
            assert granted is job, "others were granted when there was room"

    def _gave_back(self, node: SimulatedNode, job: Job, now: float) -> None:
        """A sequence has ended on the node: others may have its blocks."""
        if self._sources.pop(job, None) is None or not job.is_granted:
            return
        node.grants.ended(job)
        for granted in node.grants.granted():
            self._sources[granted].link.pushed_late(granted, now)
            if granted.computed_at:
                self._hand_over(granted, now)

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
        for node in self.nodes:
            status = status_of(node, self._ping, self._costs)
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
