"""A simulated router process that places by the elastic rule (docs/elastic.md), from what nodes report."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.leanings import PromptShare, SimulatedLeanings
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.deploy.bench.simulated.router import EPOCH, Placing, SimulatedMirror
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Targets
from tandem.engine.contracts.wire.work import MOST_PROMPTS, NodeReport
from tandem.kv_connector.directory.records import DirectoryEvent
from tandem.router.placing.elastic import ElasticPlacement, Fleet, Roads, Task
from tandem.router.placing.forerunners import QUEUE_SHARE, Forerunners
from tandem.router.placing.leaning import Side
from tandem.router.placing.outlook import Outlook

MAY_WAIT_S = QUEUE_SHARE * Timeouts().connect_s  # as long as a request waits for a node that was told nothing


class ElasticRouter:
    """Learns of nodes by their reports and by batches of the directory, and places."""

    def __init__(self, nodes: Sequence[SimulatedNode], shape: ClusterShape, leanings: SimulatedLeanings) -> None:
        costs = shape.costs
        self._costs, self._targets, self._leanings = costs, shape.targets, leanings
        self._mirror = SimulatedMirror(nodes)
        self._shares = {node.node_id: PromptShare() for node in nodes}
        self._outlooks = {n.node_id: Outlook(NodeKey(n.node_id, EPOCH), self._report(n, 0.0)) for n in nodes}
        self._by_key = {outlook.key: outlook for outlook in self._outlooks.values()}
        self._fleet = Fleet(
            [self._outlooks[node.node_id] for node in nodes],
            [self._outlooks[node.node_id] for node in nodes if node.role != "prefill"],
            Roads(costs.handover_s, costs.push_s_per_token, costs.fetch_s_per_token),
            stays=frozenset(self._outlooks[node.node_id].key for node in nodes if node.role == "decode"),
            leanings=leanings.sides,
            kinds={self._outlooks[node.node_id].key: node.role for node in nodes},
        )
        self._placement = ElasticPlacement(shape.most_nodes)
        self._forerunners = Forerunners()

    def take(self, events: Sequence[DirectoryEvent]) -> None:
        self._mirror.take(events)

    def hear(self, node: SimulatedNode, ping: int, now: float) -> None:
        self._outlooks[node.node_id].note_report(self._report(node, now), now, now)

    def heard_all(self, now: float) -> None:
        self._leanings.look(self._outlooks.values(), now)

    def first_token(self, job: Job, now: float) -> None:
        self._forerunners.settled(job, now)

    def _report(self, node: SimulatedNode, now: float) -> NodeReport:
        share = self._shares[node.node_id].at(now, node.prefill_s)
        return report_of(node, self._costs, self._targets, share, now)

    def place(self, job: Job, ping: int, now: float) -> Placing | None:
        cached, waited_s = self._mirror.cached(job), now - job.arrived_at
        if self._forerunners.should_wait(job, job.hashes, lambda: cached, waited_s, MAY_WAIT_S, now):
            return None
        task = Task(job.num_prompt_tokens, max(0.0, self._targets.ttft_s - waited_s), self._targets.tpot_s)
        plan = self._placement.find(task, self._fleet, cached, now)
        assert plan is not None
        lead = self._by_key[plan.computing[0]]
        self._forerunners.placed(job, job.hashes, TRACE_BLOCK, lead, now + plan.own_s)
        for key in plan.computing:
            outlook = self._by_key[key]
            outlook.note_placement(round(plan.share_s / outlook.s_per_token), now + plan.due_s, 0, now)
        self._by_key[plan.decoding].note_placement(0, 0.0, 1, now, job.num_prompt_tokens)
        peer = plan.peer.node_id if plan.peer is not None else ""
        return Placing(tuple(key.node_id for key in plan.computing), plan.decoding.node_id, peer)


def leanings_of(nodes: Sequence[SimulatedNode], shape: ClusterShape) -> dict[NodeKey, Side]:
    """What nodes are for at first, where they lean."""
    return {
        NodeKey(node.node_id, EPOCH): "prefill" if role == "prefill" else "decode"
        for node, role in zip(nodes, shape.starting_roles, strict=True)
        if shape.leans and role != "unified"
    }


def report_of(node: SimulatedNode, costs: CostModel, targets: Targets, prompt_share: float, now: float) -> NodeReport:
    """What the node tells in answer to a heartbeat."""
    prompts = sorted(node.prompts_due(now))
    return NodeReport(
        s_per_token=node.prefill_s_per_token,
        least_s_per_token=costs.prefill_s_per_token,
        attention_growth=costs.prefill_s_per_token_and_context / costs.prefill_s_per_token,
        free_s=node.free_s(now),
        prompts=tuple(prompts[:MOST_PROMPTS]),
        num_more_tokens=sum(num_tokens for _, num_tokens in prompts[MOST_PROMPTS:]),
        num_streams=node.num_streams,
        step_s=node.decode_s,
        stream_s_per_token=costs.context_s_per_token,
        free_tokens=node.num_free_blocks * TRACE_BLOCK,
        targets=targets,
        prompt_share=prompt_share,
        least_step_s=costs.decode_s(0, 0),
    )
