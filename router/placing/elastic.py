"""Who computes a prompt and who decodes it, by the lateness that it would cause: docs/elastic.md. Pure.

Each way to serve a request is priced in seconds: until its first
token, what others wait longer for it, LATE_S for everybody who would be late by it, and what has to be moved or kept
twice. The cheapest is taken; of equals the one whose nodes come first by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT, STRETCH
from tandem.router.placing.division import takers_of_streams
from tandem.router.placing.outlook import Forecast, Outlook
from tandem.router.placing.policies import DUPLICATE_COST, NO_ROOM_S, SEQUENCE_COST_TOKENS, SESSION_PATIENCE_S

# Work on a node that is for the other first: so much of what a prompt takes there, so much for a stream, and never as
# much as somebody who is late.
AGAINST_PROMPT, AGAINST_STREAM_S, MOST_AGAINST_S = 2.0, 0.5, 5.0  # guesses
LATE_S = 10.0  # what somebody who is late costs, in seconds of somebody's waiting; a guess
# What a prompt costs more on a node that lately got twice the mean of prompt work or more, in shares of its time there.
CROWDED_COST = 2.0  # docs/simulator.md#256-nodes
MOST_NODES = 4  # that compute one prompt; a guess
SHARED_TOKENS = 4096  # of a prompt for each node that computes it, at least: shorter parts are all launches; a guess
# Of prompts that are computed beside streams where nodes divide; longer ones take all that those streams can spare.
BESIDE_STREAMS_TOKENS = 1024  # docs/measurements.md#deadlines-on-a-trace
LEANING_RANK = {"decode": 1, "unified": 2, "prefill": 3}  # who takes streams first; 0: a decode node
SHORTLIST = 8  # nodes that are looked at closely: of the least busy ones, and of those that hold most; a guess


class Task(msgspec.Struct, frozen=True):
    """A request to be placed, and what is promised to it in seconds."""

    num_prompt_tokens: int
    ttft_s: float
    tpot_s: float  # 0.0: nothing
    moves: bool = True  # whether another node may decode than the one that computes
    may_be_shared: bool = True  # whether several nodes may compute it
    homes: frozenset[NodeKey] = frozenset()  # where its session belongs, if nobody is known to hold any of it
    adapter_s: Mapping[NodeKey, float] = {}  # where its adapter would have to be read, what that takes


class Roads(msgspec.Struct, frozen=True):
    """What moving KV takes, in seconds, as measured."""

    handover_s: float  # of a hand-over, beside its bytes
    transfer_s_per_token: float  # handed over
    fetch_s_per_token: float = 0.0  # pulled from a peer's cache; 0.0: nodes don't


@dataclass(frozen=True)
class Fleet:
    """Who may compute a prompt, who may decode, and what moving its KV takes. Nodes that may do both are in both."""

    computing: Sequence[Outlook]
    decoding: Sequence[Outlook]
    roads: Roads
    stays: frozenset[NodeKey] = frozenset()  # who computes only what he decodes
    takes_none: frozenset[NodeKey] = frozenset()  # who decodes only what he computes
    leanings: Mapping[NodeKey, str] = field(default_factory=dict)  # who is for prompts ("prefill") or streams first
    kinds: Mapping[NodeKey, Hashable | None] = field(default_factory=dict)  # nodes of the same may share a prompt


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

    def explanation(self) -> str:
        """ASCII for people."""
        times = f"first_token={self.own_s * 1e3:.1f}ms due={self.due_s * 1e3:.0f}ms"
        return f"cost={self.cost_s:.3f}s {times} late={self.num_late}"


class Spread(NamedTuple):
    """Nodes that help one that has a prompt, and what is foreseen of it. Seconds are those until the first token."""

    helpers: tuple[NodeKey, ...]
    alone_s: float
    own_s: float
    num_late_alone: int
    num_late: int
    share_s: float  # what each node works
    due_s: float

    def explanation(self) -> str:
        """ASCII for people."""
        times = f"first_token={self.own_s * 1e3:.1f}ms alone={self.alone_s * 1e3:.1f}ms"
        return f"{times} late={self.num_late} alone={self.num_late_alone}"


class _Price(NamedTuple):
    """What it costs that these nodes compute the prompt, decodes aside."""

    cost_s: float
    own_s: float  # until the first token
    num_late: int
    share_s: float  # what each node works
    due_s: float


@dataclass(frozen=True, slots=True)
class _Lead:
    """A node that could compute the prompt or its first chunk, and what it finds of it."""

    node: Outlook
    num_held: int
    num_pulled: int
    peer: NodeKey | None


@dataclass(frozen=True)
class ElasticPlacement:
    """The rule. `most_nodes`: that compute one prompt, each of them `shared_tokens` at least."""

    most_nodes: int = MOST_NODES
    shared_tokens: int = SHARED_TOKENS

    def find(self, task: Task, fleet: Fleet, cached: Mapping[NodeKey, int], now: float) -> Plan | None:
        """The cheapest plan; None when no node may compute or none may decode. `cached`: leading tokens, by node."""
        return min(self._search(task, fleet, cached, now).plans(), key=_by_cost, default=None)

    def plans(self, task: Task, fleet: Fleet, cached: Mapping[NodeKey, int], now: float) -> list[Plan]:
        """All plans that are looked at, the cheapest first."""
        return sorted(self._search(task, fleet, cached, now).plans(), key=_by_cost)

    def _search(self, task: Task, fleet: Fleet, cached: Mapping[NodeKey, int], now: float) -> _Search:
        return _Search(task, _divided(task, fleet, cached), cached, now, self)

    def spread(
        self, task: Task, lead: Outlook, others: Sequence[Outlook], num_cached: int, now: float
    ) -> Spread | None:
        """Who of `others` would make a prompt cost less that `lead` has; None: nobody."""
        fleet = Fleet([lead, *others], [lead], Roads(0.0, 0.0))
        return _Search(task, fleet, {lead.key: num_cached}, now, self).spread(lead, others)


def _by_cost(plan: Plan) -> tuple[float, tuple[NodeKey, ...], NodeKey]:
    return plan.cost_s, plan.computing, plan.decoding


def _divided(task: Task, fleet: Fleet, cached: Mapping[NodeKey, int]) -> Fleet:
    """The fleet in which streams have as few nodes as they need, where that matters (division.py): those compute what
    is short. Leanings are no prices there, they say who takes streams first."""
    if not task.moves:
        return fleet

    def rank(key: NodeKey) -> int:
        return 0 if key in fleet.stays else LEANING_RANK[fleet.leanings.get(key, "unified")]

    takers_of = [node for node in fleet.decoding if node.key not in fleet.takes_none]
    known = {node.key for node in fleet.decoding}
    takers = takers_of_streams(takers_of, task.tpot_s, any(node.key not in known for node in fleet.computing), rank)
    if takers is None or takers.issuperset(node.key for node in fleet.computing):
        return fleet

    def may_compute(node: Outlook) -> bool:
        is_short = task.num_prompt_tokens - cached.get(node.key, 0) <= BESIDE_STREAMS_TOKENS
        return is_short or not node.num_streams or node.key not in takers

    return replace(
        fleet,
        computing=[node for node in fleet.computing if may_compute(node)],
        decoding=[node for node in fleet.decoding if node.key in takers or node.key in fleet.takes_none],
        stays=fleet.stays | takers,
        leanings={},
    )


class _Search:
    """One decision."""

    def __init__(
        self, task: Task, fleet: Fleet, cached: Mapping[NodeKey, int], now: float, rule: ElasticPlacement
    ) -> None:
        self._task, self._cached, self._now, self._rule = task, cached, now, rule
        self._fleet, self._roads = fleet, fleet.roads
        self._without: dict[NodeKey, Forecast] = {}  # what becomes of nodes' prompts without this one
        self._usual_s = 0.0  # what nodes got of prompt work lately, on average
        self._streams: dict[NodeKey, tuple[float, int]] = {}  # what one more stream costs, where

    def plans(self) -> list[Plan]:
        task, fleet = self._task, self._fleet
        self._streams = {node.key: self._stream_cost(node) for node in fleet.decoding}
        computing = fleet.computing if task.moves else [node for node in fleet.computing if node.key in self._streams]
        self._usual_s = sum(node.recent_s for node in computing) / max(1, len(computing))
        near = self._shortlist(computing)
        self._without = {node.key: node.without(self._now) for node in near}
        takers = [node for node in fleet.decoding if task.moves and node.key not in fleet.takes_none]
        sinks = heapq.nsmallest(2, takers, key=lambda node: (self._streams[node.key][0], node.key))
        holder = self._holder()
        leads = [self._lead(node, holder) for node in near]
        alone = {lead.node.key: self._price([lead]) for lead in leads}
        plans = [plan for lead in leads for plan in self._of_group([lead], alone[lead.node.key], sinks)]
        if self._rule.most_nodes > 1 and task.may_be_shared and plans:
            plans += self._shared(min(plans, key=_by_cost), leads, alone, sinks)
        return plans

    def _shared(
        self, best: Plan, leads: Sequence[_Lead], alone: dict[NodeKey, _Price], sinks: Sequence[Outlook]
    ) -> list[Plan]:
        """The plans of several nodes: where somebody would be late by the `best` of those of one, else of nodes that
        have nothing to do."""
        if not best.num_late:
            leads = [each for each in leads if self._is_idle(each.node)]
        others = {each.node.key: each for each in leads}
        for node in self._mates(best, others):
            self._without[node.key] = node.without(self._now)
            others[node.key] = each = self._lead(node, (None, 0))
            alone[node.key] = self._price([each])
        ordered = sorted(others.values(), key=lambda each: (alone[each.node.key].cost_s, each.node.key))
        plans: list[Plan] = []
        for lead in leads:
            helpers = [each for each in ordered if self._may_help(each.node, lead)]
            for num_nodes in self._numbers(lead, 1 + len(helpers))[1:]:
                group = [lead, *helpers[: num_nodes - 1]]
                plans += self._of_group(group, self._price(group), sinks)
        return plans

    def _mates(self, best: Plan, others: Mapping[NodeKey, _Lead]) -> list[Outlook]:
        """Who may share a prompt with the first node of `best`, and is not among `others`: of many nodes those are
        few that are looked at."""
        fleet, lead = self._fleet, best.computing[0]
        if len(fleet.computing) <= SHORTLIST or best.peer is not None or fleet.kinds.get(lead) is None:
            return []
        found = [n for n in fleet.computing if fleet.kinds.get(n.key) == fleet.kinds[lead] and n.key not in others]
        found = [node for node in found if node.key != lead and (best.num_late or self._is_idle(node))]
        return heapq.nsmallest(self._rule.most_nodes, found, key=lambda node: (node.backlog_s(self._now), node.key))

    def _may_help(self, node: Outlook, lead: _Lead) -> bool:
        kinds, has_room = self._fleet.kinds, node.report.free_tokens > self._task.num_prompt_tokens
        is_alike = kinds.get(node.key) is not None and kinds[node.key] == kinds.get(lead.node.key)
        return is_alike and has_room and node is not lead.node and not lead.num_pulled

    def _is_idle(self, node: Outlook) -> bool:
        return not node.num_streams and not node.has_prompts(self._now)

    def spread(self, lead: Outlook, others: Sequence[Outlook]) -> Spread | None:
        """See ElasticPlacement."""
        self._without = {node.key: node.without(self._now) for node in (lead, *others)}
        first, *rest = [self._lead(node, (None, 0)) for node in (lead, *others)]
        rest.sort(key=lambda each: (self._price([each]).cost_s, each.node.key))
        numbers = [num for num in (1, 2, 4, 8) if num <= min(self._rule.most_nodes, 1 + len(rest))]
        prices = {num: self._price([first, *rest[: num - 1]]) for num in numbers}
        alone, num = prices[1], min(prices, key=lambda each: (prices[each].cost_s, each))
        if num == 1:
            return None
        best, helpers = prices[num], tuple(each.node.key for each in rest[: num - 1])
        return Spread(helpers, alone.own_s, best.own_s, alone.num_late, best.num_late, best.share_s, best.due_s)

    # --- who may ------------------------------------------------------------------------------------------------

    def _shortlist(self, nodes: Sequence[Outlook]) -> list[Outlook]:
        if len(nodes) <= SHORTLIST:
            return list(nodes)
        backlogs = {node.key: node.backlog_s(self._now) for node in nodes}
        idle = heapq.nsmallest(SHORTLIST, nodes, key=lambda node: (backlogs[node.key], node.recent_s, node.key))
        holding = [node for node in nodes if node.key in self._cached]
        most = heapq.nsmallest(SHORTLIST, holding, key=lambda n: (-self._cached[n.key], backlogs[n.key], n.key))
        return list({node.key: node for node in (*idle, *most)}.values())

    def _holder(self) -> tuple[NodeKey | None, int]:
        """Returns who has most of the prompt, and how much; nobody where nodes don't pull."""
        cached = self._cached
        if not cached or not self._roads.fetch_s_per_token:
            return None, 0
        holder = min(cached, key=lambda key: (-cached[key], key))
        return holder, min(cached[holder], self._task.num_prompt_tokens - 1)

    def _lead(self, node: Outlook, holder: tuple[NodeKey | None, int]) -> _Lead:
        peer, most = holder
        held = min(self._cached.get(node.key, 0), self._task.num_prompt_tokens - 1)
        return _Lead(node, held, most - held, peer) if most > held else _Lead(node, held, 0, None)

    def _numbers(self, lead: _Lead, num_nodes: int) -> list[int]:
        num_new = self._task.num_prompt_tokens - lead.num_held - lead.num_pulled
        most = min(self._rule.most_nodes, num_nodes, max(1, num_new // self._rule.shared_tokens))
        return [num for num in (1, 2, 4, 8) if num <= most]

    # --- what it costs ------------------------------------------------------------------------------------------

    def _of_group(self, group: Sequence[_Lead], price: _Price, sinks: Sequence[Outlook]) -> list[Plan]:
        """The plans of this group: to stay, if its first node may decode, and to hand over to the best of the
        others."""
        lead, num_tokens = group[0], self._task.num_prompt_tokens
        plans = []
        home = [lead.node] if lead.node.key in self._streams else []
        away = [] if lead.node.key in self._fleet.stays else [node for node in sinks if node is not lead.node]
        for sink in home + away[:1]:
            stream_s, num_slowed = self._streams[sink.key]
            moved = 0 if sink is lead.node else num_tokens - self._cached.get(sink.key, 0)
            twice_s = moved * DUPLICATE_COST * lead.node.least_s_per_token * (not self._is_meant(lead, sink))
            moving_s = self._roads.handover_s * (sink is not lead.node) + moved * self._roads.transfer_s_per_token
            against_s = self._against(group, price, sink)
            homes = self._task.homes
            against_s += SESSION_PATIENCE_S * bool(homes and not homes.issuperset((lead.node.key, sink.key)))
            plans.append(
                Plan(
                    computing=tuple(each.node.key for each in group),
                    decoding=sink.key,
                    peer=lead.peer,
                    cost_s=price.cost_s + stream_s + moving_s + twice_s + against_s + self._reading_s(group, sink),
                    own_s=price.own_s,
                    num_late=price.num_late + num_slowed,
                    share_s=price.share_s,
                    due_s=price.due_s,
                )
            )
        return plans

    def _is_meant(self, lead: _Lead, sink: Outlook) -> bool:
        """Whether handing over is what these nodes are there for."""
        leanings = self._fleet.leanings
        return leanings.get(lead.node.key) == "prefill" and leanings.get(sink.key) == "decode"

    def _against(self, group: Sequence[_Lead], price: _Price, sink: Outlook) -> float:
        leanings = self._fleet.leanings
        prompt_s = sum(leanings.get(each.node.key) == "decode" for each in group) * AGAINST_PROMPT * price.share_s
        return min(MOST_AGAINST_S, prompt_s + AGAINST_STREAM_S * (leanings.get(sink.key) == "prefill"))

    def _reading_s(self, group: Sequence[_Lead], sink: Outlook) -> float:
        """What it takes to read the request's adapter where it isn't in memory."""
        return sum(
            self._task.adapter_s.get(key, 0.0) for key in dict.fromkeys([*(each.node.key for each in group), sink.key])
        )

    def _price(self, group: Sequence[_Lead]) -> _Price:
        task, now = self._task, self._now
        share_s = max(self._seconds(lead) for lead in group) / len(group)
        lead = group[0]
        due_s = max(task.ttft_s, STRETCH * task.num_prompt_tokens / len(group) * lead.node.s_per_token)
        own_s, num_late, others_s = 0.0, 0, 0.0
        for each in group:
            without = self._without[each.node.key]
            forecast = each.node.forecast(now, share_s, now + due_s)
            own_s = max(own_s, forecast.own_s)
            num_late += max(0, forecast.num_late - without.num_late - (forecast.own_s > due_s))
            others_s += forecast.others_s - without.others_s + CROWDED_COST * self._crowding(each.node) * share_s
        num_late += own_s > task.ttft_s
        twice_s = lead.num_pulled * DUPLICATE_COST * lead.node.s_per_token
        return _Price(own_s + others_s + LATE_S * num_late + twice_s, own_s, num_late, share_s, due_s)

    def _crowding(self, node: Outlook) -> float:
        """How much more prompt work a node got lately than others, of 1. Else those that are looked at first, or that
        hold more, would get more for good."""
        return min(1.0, max(0.0, node.recent_s / self._usual_s - 1)) if self._usual_s else 0.0

    def _seconds(self, lead: _Lead) -> float:
        """What the prompt takes on that node alone, and pulling its prefix."""
        node, found = lead.node, lead.num_held + lead.num_pulled
        computing_s = node.seconds_for(found, self._task.num_prompt_tokens)
        return computing_s + lead.num_pulled * self._roads.fetch_s_per_token

    def _stream_cost(self, sink: Outlook) -> tuple[float, int]:
        """Returns what one more stream costs there, and how many would be too slow by it."""
        report, num_streams, task = sink.report, sink.num_streams, self._task
        own_s = task.num_prompt_tokens * report.stream_s_per_token
        unseen_s = sink.num_placed_tokens * report.stream_s_per_token  # of streams that the report doesn't show
        is_slow = bool(task.tpot_s) and report.step_s + unseen_s + own_s > AIMED_AT * task.tpot_s
        num_slowed = num_streams + 1 if is_slow else 0
        cost_s = SEQUENCE_COST_TOKENS * sink.s_per_token * num_streams + LATE_S * num_slowed
        lacks_room = report.free_tokens < task.num_prompt_tokens
        return cost_s + NO_ROOM_S * lacks_room, num_slowed
