"""How a node is chosen among those that can do a part of a request. Pure: time is passed in.

    round_robin    each node in turn
    least_loaded   the one with the least work
    power_of_two   the one of two random ones with less work: needs no exact figures (Mitzenmacher 2001)
    prefix_aware   the one that costs least, in seconds: work in front of it, prompt tokens to compute or to fetch from
                   a peer, KV to move; what it has cached costs nothing

Work and costs are in seconds by the rates that nodes measure and report.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.keys import NodeKey
from tandem.router.placing.view import NodeView

# What one running or waiting sequence costs others on a node, as prompt tokens.
SEQUENCE_COST_TOKENS = 64  # a guess
# What it costs, besides computing or fetching it, to have a token here that a peer holds already: kept twice, it pushes
# others out of this cache, and those behind it wait too. In shares of computing it; by simulation of a real trace, more
# finds little more and lengthens queues.
DUPLICATE_COST = 2.0  # docs/measurements.md#placement-on-a-trace
# What new content costs a cache that got twice the average or more of it lately, in shares of computing it: as much as
# a hit on it is worth elsewhere. Else all that shares a short prefix fills one cache of an idle cluster.
CROWDING_COST = 1 + DUPLICATE_COST
# A session stays at its home until others are ahead by this much prompt work, or its home has no room.
SESSION_PATIENCE_S = 1.0  # a guess
# A node without room for the prompt makes it wait; any other node is better, however busy.
NO_ROOM_S = 3600.0  # a guess


class Work(msgspec.Struct, frozen=True):
    """A part of a request. `kind`: "prompt" (compute it), "tokens" (take its KV over, decode) or "all" (both)."""

    kind: str
    num_prompt_tokens: int
    transfer_s_per_token: float = 0.0  # as measured by those that would hand over; 0: unknown
    adapter: bytes = b""  # the mark of the one that it takes


class Choice(msgspec.Struct, frozen=True):
    """A node for a part of a request and what that was expected to cost, in seconds."""

    node: NodeView
    kind: str
    num_cached_tokens: int
    num_fetched_tokens: int  # tokens that are cheaper to fetch from a peer than to compute
    queue_s: float
    compute_s: float
    transfer_s: float
    sequences_s: float
    duplicate_s: float
    crowding_s: float
    num_new_tokens: int
    no_room: bool = False
    why: str = ""  # the policy, or "session"
    num_candidates: int = 1
    holder: str = ""  # whom the fetched tokens come from
    adapter_s: float = 0.0  # to read the adapter

    @property
    def cost_s(self) -> float:
        work_s = self.queue_s + self.compute_s + self.transfer_s + self.sequences_s + self.adapter_s
        return work_s + self.duplicate_s + self.crowding_s + NO_ROOM_S * self.no_room

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that this node will have to compute, by what is known."""
        return round(self.compute_s / self.node.prefill_s_per_token)

    def explanation(self) -> str:
        seconds = {
            "queue": self.queue_s,
            "compute": self.compute_s,
            "transfer": self.transfer_s,
            "sequences": self.sequences_s,
            "duplicate": self.duplicate_s,
            "crowding": self.crowding_s,
            "adapter": self.adapter_s,
        }
        words = [f"{self.kind}={self.node.info.node_id}"]
        words += [f"by={self.why} of={self.num_candidates}"] if self.why else []
        words += [f"cached={self.num_cached_tokens}"]
        words += [f"fetched={self.num_fetched_tokens} from={self.holder}"] if self.num_fetched_tokens else []
        words += [f"{name}={value * 1e3:.1f}ms" for name, value in seconds.items() if value]
        return " ".join([*words, "no_room"] if self.no_room else words)


class PlacementPolicy(Protocol):
    """A rule that chooses one node for one half of a request."""

    name: str

    def choose(self, work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float) -> Choice:
        """One of `nodes`, which are usable and at least one. `cached`: leading prompt tokens held, per node."""


def mean_new_tokens(nodes: Sequence[NodeView]) -> float:
    return sum([node.num_new_tokens for node in nodes]) / len(nodes)


def price(
    node: NodeView,
    work: Work,
    cached: Mapping[NodeKey, int],
    now: float,
    usual: float,
    why: str = "",
    num_candidates: int = 1,
) -> Choice:
    """What `work` would cost on `node`. The last token of a prompt is always computed.

    `usual`: `mean_new_tokens` of the nodes to choose from.
    """
    held = cached.get(node.key, 0)
    tail = max(1, work.num_prompt_tokens - held)
    queue_s = compute_s = transfer_s = sequences_s = duplicate_s = 0.0
    fetched, no_room = 0, False
    crowding = min(1.0, max(0.0, node.num_new_tokens / usual - 1)) if usual else 0.0
    crowding_s = CROWDING_COST * crowding * tail * node.prefill_s_per_token
    if work.kind == "tokens":
        transfer_s = tail * (work.transfer_s_per_token or node.transfer_s_per_token)
    else:
        queue_s = node.backlog_s(now)
        missing = max(0, min(max(cached.values(), default=0), work.num_prompt_tokens - 1) - held)
        fetched = missing if node.fetch_gain_s_per_token else 0
        duplicate_s = missing * DUPLICATE_COST * node.prefill_s_per_token
        transfer_s = fetched * node.fetch_s_per_token
        compute_s = (tail - fetched) * node.prefill_s_per_token
    if work.kind != "prompt":
        sequences_s = SEQUENCE_COST_TOKENS * node.prefill_s_per_token * node.num_sequences
        no_room = node.free_tokens < tail
    return Choice(
        node,
        work.kind,
        held,
        fetched,
        queue_s,
        compute_s,
        transfer_s,
        sequences_s,
        duplicate_s,
        crowding_s,
        tail,
        no_room,
        why,
        num_candidates,
        adapter_s=node.adapter_s(work.adapter),
    )


def costs(
    work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float, usual: float
) -> list[float]:
    """`price(…).cost_s` of each node, without the objects: a cluster may have hundreds of nodes."""
    num_tokens = work.num_prompt_tokens
    least_tail = max(1, num_tokens - max(cached.values(), default=0))
    found = _costs_of_tail(work, nodes, num_tokens, num_tokens - least_tail, now, usual)
    if cached:
        for index, node in enumerate(nodes):
            held = cached.get(node.key)
            if held:
                tail = max(1, num_tokens - held)
                (found[index],) = _costs_of_tail(work, (node,), tail, tail - least_tail, now, usual)
    return found


def _costs_of_tail(
    work: Work, nodes: Sequence[NodeView], tail: int, at_peers: int, now: float, usual: float
) -> list[float]:
    """Where each of `nodes` lacks the last `tail` tokens of the prompt, `at_peers` of which some peer holds.

    What can be counted in tokens is, so that a node takes few operations."""
    crowded = CROWDING_COST * tail
    crowded_for_each = crowded / usual if usual > 0 else 0.0
    at_home = tail + DUPLICATE_COST * at_peers if work.kind != "tokens" else 0.0
    handed_s = tail * work.transfer_s_per_token
    found = []
    for node in nodes:
        num_tokens = at_home
        if node.num_new_tokens > usual > 0:
            excess = node.num_new_tokens * crowded_for_each - crowded
            num_tokens += excess if excess < crowded else crowded
        if work.kind != "prompt":
            num_tokens += SEQUENCE_COST_TOKENS * node.num_sequences
        cost = num_tokens * node.prefill_s_per_token
        if at_home:
            if at_peers:
                cost -= at_peers * node.fetch_gain_s_per_token
            if node.idle_at > now:
                cost += node.idle_at - now
        else:
            cost += handed_s or tail * node.transfer_s_per_token
        if node.free_tokens < tail and work.kind != "prompt":
            cost += NO_ROOM_S
        if work.adapter:
            cost += node.adapter_s(work.adapter)
        found.append(cost)
    return found


def load_s(node: NodeView, kind: str, now: float) -> float:
    """The seconds of work that a node has, whatever the request brings."""
    load = 0.0 if kind == "tokens" else node.backlog_s(now)
    if kind != "prompt":
        load += SEQUENCE_COST_TOKENS * node.prefill_s_per_token * node.num_sequences
        load += NO_ROOM_S * (node.free_tokens < 1)
    return load


class RoundRobin:
    """Takes each node in turn, each kind of work in a turn of its own."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # kind of work -> node id

    def choose(self, work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float) -> Choice:
        last = self._last.get(work.kind, "")
        ordered = sorted(nodes, key=lambda node: node.info.node_id)
        node = next((node for node in ordered if node.info.node_id > last), ordered[0])
        self._last[work.kind] = node.info.node_id
        return price(node, work, cached, now, mean_new_tokens(nodes), self.name, len(nodes))


class LeastLoaded:
    """Takes the node with the least seconds of work in front of it."""

    name = "least_loaded"

    def choose(self, work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float) -> Choice:
        node = min(nodes, key=lambda n: (load_s(n, work.kind, now), n.num_unseen, n.num_new_tokens, n.key))
        return price(node, work, cached, now, mean_new_tokens(nodes), self.name, len(nodes))


class PowerOfTwo:
    """Takes the less loaded one of two random nodes."""

    name = "power_of_two"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float) -> Choice:
        pair = self._random.sample(nodes, min(2, len(nodes)))
        node = min(pair, key=lambda n: (load_s(n, work.kind, now), n.num_unseen))
        return price(node, work, cached, now, mean_new_tokens(nodes), self.name, len(nodes))


class PrefixAware:
    """Takes the node where the work costs least, what it has cached counted as nothing."""

    name = "prefix_aware"

    def choose(self, work: Work, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float) -> Choice:
        usual = mean_new_tokens(nodes)
        prices = costs(work, nodes, cached, now, usual)
        least = min(prices)
        node = nodes[prices.index(least)]
        if prices.count(least) > 1:
            equals = [node for node, cost in zip(nodes, prices, strict=True) if cost == least]
            node = min(equals, key=lambda n: (n.num_unseen, n.num_new_tokens, n.key))
        return price(node, work, cached, now, usual, self.name, len(nodes))


def make_policy(name: PlacementName, seed: int = 0) -> PlacementPolicy:
    """The policy of that name. `seed` is for policies that draw; each router process has another, so that they don't
    draw alike."""
    policies: dict[PlacementName, Callable[[], PlacementPolicy]] = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": lambda: PowerOfTwo(seed),
        "prefix_aware": PrefixAware,
        "elastic": PrefixAware,  # where nodes don't report their work, and for sessions
    }
    return policies[name]()
