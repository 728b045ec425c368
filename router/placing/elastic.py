"""Who computes a prompt and who decodes it, by the lateness that it would cause: docs/elastic.md. Pure.

Every node does all work as far as its role allows. Each way to serve a request is priced in seconds: until its first
token, what others wait longer for it, LATE_S for everybody who would be late by it, and what has to be moved or kept
twice. The cheapest is taken; of equals the one whose nodes come first by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT, STRETCH
from tandem.router.placing.outlook import Forecast, Outlook
from tandem.router.placing.policies import DUPLICATE_COST, NO_ROOM_S, SEQUENCE_COST_TOKENS

LATE_S = 10.0  # what somebody who is late costs, in seconds of somebody's waiting; a guess
MOST_NODES = 4  # that compute one prompt; a guess
SHARED_TOKENS = 4096  # of a prompt for each node that computes it, at least: shorter parts are all launches; a guess
SHORTLIST = 8  # nodes that are looked at closely: of the least busy ones, and of those that hold most; a guess


class Task(msgspec.Struct, frozen=True):
    """A request to be placed, and what is promised to it in seconds."""

    num_prompt_tokens: int
    max_tokens: int
    ttft_s: float
    tpot_s: float


class Roads(msgspec.Struct, frozen=True):
    """What moving KV takes, in seconds, as measured."""

    handover_s: float  # of a hand-over, beside its bytes
    transfer_s_per_token: float  # handed over
    fetch_s_per_token: float = 0.0  # pulled from a peer's cache; 0.0: nodes don't


class Plan(msgspec.Struct, frozen=True):
    """The nodes of a request. `computing`: one, or several that take its chunks in turn, the first of which has or
    pulls the cached prefix. `share_s`: what each of them works for it."""

    computing: tuple[NodeKey, ...]
    decoding: NodeKey
    peer: NodeKey | None  # that the prefix is pulled from
    cost_s: float
    own_s: float  # until the first token
    num_late: int  # who would not be but for this request, itself included
    share_s: float
    due_s: float  # until the first token is due


@dataclass(frozen=True)
class _Lead:
    """A node that could compute the prompt or its first chunk, and what it finds of it."""

    node: Outlook
    num_held: int
    num_pulled: int
    peer: NodeKey | None


@dataclass
class ElasticPlacement:
    """One per router process. `most_nodes`: that compute one prompt."""

    roads: Roads
    most_nodes: int = MOST_NODES
    _without: dict[NodeKey, Forecast] = field(default_factory=dict)  # what becomes of nodes' prompts without this one
    _streams: dict[NodeKey, tuple[float, int]] = field(default_factory=dict)  # what one more stream costs, where

    def find(self, task: Task, nodes: Sequence[Outlook], cached: Mapping[NodeKey, int], now: float) -> Plan | None:
        """The cheapest plan; None when no node may compute or none may decode. `cached`: leading tokens, by node."""
        computing = [node for node in nodes if node.report.role != "decode"]
        decoding = [node for node in nodes if node.report.role != "prefill"]
        if not computing or not decoding:
            return None
        near = self._shortlist(computing, cached, now)
        self._without = {node.key: node.forecast(now) for node in near}
        self._streams = {node.key: self._stream_cost(node, task) for node in decoding}
        sinks = heapq.nsmallest(2, decoding, key=lambda node: (self._streams[node.key][0], node.key))
        holder = self._holder(task, cached)
        leads = [self._lead(node, task, cached.get(node.key, 0), holder) for node in near]
        alone_s = {lead.node.key: self._group_cost(task, [lead], now)[0] for lead in leads}
        plans: list[Plan] = []
        for lead in leads:
            others = sorted((o for o in leads if o is not lead), key=lambda o: (alone_s[o.node.key], o.node.key))
            for num_nodes in self._numbers(task, lead, len(leads)):
                plans += self._plans(task, [lead, *others[: num_nodes - 1]], sinks, cached, now)
        return min(plans, key=lambda plan: (plan.cost_s, plan.computing, plan.decoding))

    # --- who may ------------------------------------------------------------------------------------------------

    def _shortlist(self, nodes: Sequence[Outlook], cached: Mapping[NodeKey, int], now: float) -> list[Outlook]:
        if len(nodes) <= SHORTLIST:
            return list(nodes)
        backlogs = {node.key: node.backlog_s(now) for node in nodes}
        idle = heapq.nsmallest(SHORTLIST, nodes, key=lambda node: (backlogs[node.key], node.num_streams, node.key))
        holding = [node for node in nodes if node.key in cached]
        most = heapq.nsmallest(SHORTLIST, holding, key=lambda n: (-cached[n.key], backlogs[n.key], n.key))
        return list({node.key: node for node in (*idle, *most)}.values())

    def _holder(self, task: Task, cached: Mapping[NodeKey, int]) -> tuple[NodeKey | None, int]:
        """Returns who has most of the prompt, and how much; nobody where nodes don't pull."""
        if not cached or not self.roads.fetch_s_per_token:
            return None, 0
        holder = min(cached, key=lambda key: (-cached[key], key))
        return holder, min(cached[holder], task.num_prompt_tokens - 1)

    def _lead(self, node: Outlook, task: Task, held: int, holder: tuple[NodeKey | None, int]) -> _Lead:
        peer, most = holder
        held = min(held, task.num_prompt_tokens - 1)
        return _Lead(node, held, most - held, peer) if most > held else _Lead(node, held, 0, None)

    def _numbers(self, task: Task, lead: _Lead, num_leads: int) -> Iterable[int]:
        num_new = task.num_prompt_tokens - lead.num_held - lead.num_pulled
        most = min(self.most_nodes, num_leads, max(1, num_new // SHARED_TOKENS))
        return [num for num in (1, 2, 4, 8) if num <= most]

    # --- what it costs ------------------------------------------------------------------------------------------

    def _plans(
        self, task: Task, group: Sequence[_Lead], sinks: Sequence[Outlook], cached: Mapping[NodeKey, int], now: float
    ) -> list[Plan]:
        """Those of this group: to stay, if its first node may decode, and to hand over to the best of the others."""
        lead = group[0]
        cost_s, own_s, num_late, share_s = self._group_cost(task, group, now)
        plans = []
        home = [lead.node] if lead.node.key in self._streams else []
        for sink in home + [node for node in sinks if node is not lead.node][:1]:
            stream_s, num_slowed = self._streams[sink.key]
            moved = 0 if sink is lead.node else task.num_prompt_tokens - cached.get(sink.key, 0)
            twice_s = moved * DUPLICATE_COST * lead.node.report.least_s_per_token
            moving_s = self.roads.handover_s * (sink is not lead.node) + moved * self.roads.transfer_s_per_token
            plans.append(
                Plan(
                    computing=tuple(each.node.key for each in group),
                    decoding=sink.key,
                    peer=lead.peer,
                    cost_s=cost_s + stream_s + moving_s + twice_s,
                    own_s=own_s,
                    num_late=num_late + num_slowed,
                    share_s=share_s,
                    due_s=self._due_s(task, group, share_s),
                )
            )
        return plans

    def _group_cost(self, task: Task, group: Sequence[_Lead], now: float) -> tuple[float, float, int, float]:
        """Returns (cost, seconds until the first token, who would be late, what each node works), decodes aside."""
        share_s = max(self._seconds(task, lead) for lead in group) / len(group)
        due_s = self._due_s(task, group, share_s)
        own_s, num_late, others_s = 0.0, 0, 0.0
        for each in group:
            without = self._without[each.node.key]
            forecast = each.node.forecast(now, share_s, now + due_s)
            own_s = max(own_s, forecast.own_s)
            num_late += max(0, forecast.num_late - without.num_late - (forecast.own_s > due_s))
            others_s += forecast.others_s - without.others_s
        num_late += own_s > task.ttft_s
        lead = group[0]
        twice_s = lead.num_pulled * DUPLICATE_COST * lead.node.s_per_token
        return own_s + others_s + LATE_S * num_late + twice_s, own_s, num_late, share_s

    def _seconds(self, task: Task, lead: _Lead) -> float:
        """What the prompt takes on that node alone, and pulling its prefix."""
        report, found = lead.node.report, lead.num_held + lead.num_pulled
        num_new = task.num_prompt_tokens - found
        alone_s = num_new * report.least_s_per_token * (1 + (found + num_new / 2) / report.double_at)
        return max(alone_s, num_new * lead.node.s_per_token) + lead.num_pulled * self.roads.fetch_s_per_token

    def _due_s(self, task: Task, group: Sequence[_Lead], share_s: float) -> float:
        return max(task.ttft_s, STRETCH * task.num_prompt_tokens / len(group) * group[0].node.s_per_token)

    def _stream_cost(self, sink: Outlook, task: Task) -> tuple[float, int]:
        """Returns what one more stream costs there, and how many would be too slow by it."""
        report, num_streams = sink.report, sink.num_streams
        own_s = task.num_prompt_tokens * report.stream_s_per_token
        unseen_s = sink.num_placed * own_s  # streams that the report doesn't show, taken for alike
        is_slow = bool(task.tpot_s) and report.step_s + unseen_s + own_s > AIMED_AT * task.tpot_s
        num_slowed = num_streams + 1 if is_slow else 0
        cost_s = SEQUENCE_COST_TOKENS * sink.s_per_token * num_streams + LATE_S * num_slowed
        lacks_room = report.free_tokens < task.num_prompt_tokens
        return cost_s + NO_ROOM_S * lacks_room, num_slowed
