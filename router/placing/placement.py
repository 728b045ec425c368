"""Which nodes serve a request: pure policy over a snapshot of the nodes (docs/placement.md).

A decode node D and a prefill node P, or D alone when the tail that it has not cached is short and it would be done with
it before P and a hand-over, or P alone when the first token ends the request. Unified nodes do both halves. Which
halves there are is decided here; which node does a half is decided by a `PlacementPolicy`, unless the request's session
has a home that is not overloaded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NO_TARGETS, PeerRef, PrefixHint, Targets
from tandem.router.placing.elastic import Plan, Spread
from tandem.router.placing.policies import (
    SESSION_PATIENCE_S,
    Choice,
    PlacementPolicy,
    Work,
    mean_new_tokens,
    price,
)
from tandem.router.placing.prefix_source import with_holder
from tandem.router.placing.view import NodeView, affinity

__all__ = ["Choice", "NodeView", "Placement", "PlacementRequest", "find_placement", "offers"]

# What a hand-over takes besides its bytes: claim, grant, digests, commit, each at the next turn of somebody's loop.
HANDOVER_S = 0.01  # docs/measurements.md#the-gap-of-a-hand-off
# A prefill node gets a short tail that a decode node could take only if it is done with it this much sooner: a long
# prompt that comes meanwhile, which is what prefill nodes are there for, would wait for the tail.
DISTURBANCE_S = 0.02  # a guess
# What a tail waits for on a prefill node, in tokens, however many wait there: late prompts let it pass, and a step has
# no more while others wait.
PASSED_BY_TOKENS = 2048  # the default of `contended_prefill_chunk`


class PlacementRequest(msgspec.Struct, frozen=True):
    """What placement has to know of a request. `max_tokens` is a sample's."""

    num_prompt_tokens: int
    max_tokens: int
    num_samples: int = 1
    prompt_logprobs: bool = False  # computed without the cache and without a hand-off
    avoid: frozenset[NodeKey] = frozenset()  # nodes that failed this request; taken only when there is no other
    session: str = ""  # "": none
    is_precise: bool = False  # its KV needs 16 bits: one node does all, beside its pool if that is of fp8
    goes_alone: bool = False  # no node helps another with its prompt
    targets: Targets = NO_TARGETS  # what it was promised by itself or its tenant
    waited_s: float = 0.0  # until now
    adapter: bytes = b""  # the mark of the one that it takes

    @property
    def may_be_shared(self) -> bool:
        """Whether several nodes may compute its prompt."""
        return not (self.goes_alone or self.avoid or self.prompt_logprobs or self.is_precise)


class Placement(msgspec.Struct, frozen=True):
    """Which nodes serve a request, and why."""

    primary: PeerRef  # makes the tokens
    prefill: PeerRef | None  # computes the prompt and hands its KV to the primary; None: the primary does all
    reason: str
    choices: tuple[Choice, ...] = ()  # one for each of the nodes above; last that of the node that computes the prompt
    prefix: PrefixHint | None = None  # for whoever computes the prompt
    plan: Plan | None = None  # that it comes from, where the elastic rule placed
    helpers: tuple[PeerRef, ...] = ()  # who may compute chunks of it in turn with the node of the last choice
    spread: Spread | None = None  # what is foreseen of that

    def explanation(self) -> str:
        """One line of ASCII for people: what was chosen and what it was expected to cost."""
        foreseen = [] if self.plan is None else [self.plan.explanation()]
        helped = [f"helped by {','.join(each.node_id for each in self.helpers)}"] if self.helpers else []
        helped += [] if self.spread is None else [self.spread.explanation()]
        return "; ".join([self.reason, *foreseen, *(choice.explanation() for choice in self.choices), *helped])


def find_placement(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    cached_tokens: Mapping[NodeKey, int],
    local_tail_tokens: int,
    policy: PlacementPolicy,
    now: float,
) -> Placement | None:
    """The policy's choice, or None when no set of usable nodes can serve the request now.

    `cached_tokens`: leading prompt tokens that a node holds, per node; absent means none or unknown.
    """
    cached = {} if request.prompt_logprobs else cached_tokens
    finder = _Finder(request, cached, local_tail_tokens, policy, now)
    placement = None
    if request.avoid:
        placement = finder.place([node for node in nodes if node.key not in request.avoid])
    if placement is None:
        placement = finder.place(nodes)
    return None if placement is None else with_prefix(placement, nodes, cached, request)


def with_prefix(
    placement: Placement, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], request: PlacementRequest
) -> Placement:
    """The placement, with a peer for what its last choice would fetch."""
    *others, computing = placement.choices
    if not computing.num_fetched_tokens:
        return placement
    computing, prefix = with_holder(computing, nodes, cached, request.num_prompt_tokens)
    return msgspec.structs.replace(placement, choices=(*others, computing), prefix=prefix)


def fitting(request: PlacementRequest, nodes: Sequence[NodeView]) -> tuple[list[NodeView], list[NodeView]]:
    """Nodes that can hold the prompt and hand it over, and nodes that can hold all that the request may become. Those
    that were silent lately are among them only where there is no other."""
    prefills: list[NodeView] = []
    decoders: list[NodeView] = []
    silent: list[NodeView] = []
    num_prompt, num_all = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
    for node in nodes:
        if node.lost or node.draining:
            continue
        is_prefill = node.role == "prefill"
        if node.most_tokens < (num_prompt + 1 if is_prefill else num_all):
            continue
        if request.is_precise and (is_prefill or node.most_precise_tokens < num_all):
            continue
        if node.silent:
            silent.append(node)
        else:
            (prefills if is_prefill else decoders).append(node)
    if silent and not (prefills and decoders):
        prefills = prefills or [node for node in silent if node.role == "prefill"]
        decoders = decoders or [node for node in silent if node.role != "prefill"]
    return prefills, decoders


def offers(
    request: PlacementRequest, nodes: Sequence[NodeView], cached_tokens: Mapping[NodeKey, int], now: float
) -> list[Choice]:
    """What each usable node would cost for the part of the request that it could do, as prefix_aware counts."""
    prefills = [node for node in nodes if node.role == "prefill"]
    transfer_s = mean_transfer_s(prefills)
    usual = mean_new_tokens(nodes) if nodes else 0.0
    found = []
    for node in nodes:
        if node.usable:
            kind = "prompt" if node.role == "prefill" else "all"
            kind = "tokens" if node.role == "decode" and prefills else kind
            work = Work(kind, request.num_prompt_tokens, transfer_s, request.adapter)
            choice = price(node, work, cached_tokens, now, usual)
            found.append(with_holder(choice, nodes, cached_tokens, request.num_prompt_tokens)[0])
    return sorted(found, key=lambda choice: choice.cost_s)


def home_of(session: str, nodes: Sequence[NodeView]) -> NodeView:
    """The node that a session likes best, in every router process the same."""
    number = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "little")
    return max(nodes, key=lambda node: affinity(number, node))


def mean_transfer_s(sources: Sequence[NodeView]) -> float:
    """Mean seconds of handing over a token's KV, over the source nodes that have measured their pushes."""
    measured = [rate for node in sources if (rate := node.status.transfer_s_per_token)]
    return sum(measured) / len(measured) if measured else 0.0


@dataclass(slots=True)
class _Finder:
    request: PlacementRequest
    cached: Mapping[NodeKey, int]
    local_tail_tokens: int
    policy: PlacementPolicy
    now: float

    def place(self, nodes: Sequence[NodeView]) -> Placement | None:
        request = self.request
        prefills, decoders = fitting(request, nodes)
        if request.max_tokens == 1 and request.num_samples == 1 and prefills and not request.prompt_logprobs:
            choice = self._choose("prompt", [*prefills, *(n for n in decoders if n.role == "unified")])
            return Placement(choice.node.ref, None, "the first token ends it", (choice,))
        if not decoders:
            return None
        decode = self._choose("tokens" if prefills else "all", decoders, mean_transfer_s(prefills))
        alone = self._why_alone(decode)
        if alone:
            return self._alone(decode, alone)
        alone_s = self._tail_s(decode)
        detour_s = HANDOVER_S + DISTURBANCE_S
        if alone_s <= detour_s:
            return self._alone(decode, "short uncached tail")
        model = decode.node.model
        partners = [node for node in prefills if node.model == model]
        if not partners:
            return self._alone(decode, "no prefill node")
        prefill = self._choose("prompt", partners)
        queue_s = min(prefill.queue_s, PASSED_BY_TOKENS * prefill.node.prefill_s_per_token)
        if alone_s <= queue_s + prefill.compute_s + prefill.transfer_s + decode.transfer_s + detour_s:
            return self._alone(decode, "short uncached tail")
        return Placement(decode.node.ref, prefill.node.ref, "prefill and decode", (decode, prefill))

    def _tail_s(self, decode: Choice) -> float:
        """Seconds until the decode node would be done with the tail itself, beside decodes, by its measured rate."""
        tail = decode.num_new_tokens
        if tail > self.local_tail_tokens:
            return math.inf
        return decode.node.backlog_s(self.now) + tail * decode.node.prefill_s_per_token

    def _alone(self, choice: Choice, reason: str) -> Placement:
        """A placement on one node that does everything, whatever it was chosen for."""
        work = Work("all", self.request.num_prompt_tokens, adapter=self.request.adapter)
        whole = price(choice.node, work, self.cached, self.now, 0.0, choice.why, choice.num_candidates)
        return Placement(choice.node.ref, None, reason, (whole,))

    def _why_alone(self, decode: Choice) -> str:
        if decode.node.role == "unified":
            return "unified node"
        if self.request.prompt_logprobs:
            return "prompt logprobs are computed where the tokens are"
        if self.request.is_precise:
            return "fp8 can't hold its KV"
        return ""

    def _choose(self, kind: str, nodes: Sequence[NodeView], transfer_s_per_token: float = 0.0) -> Choice:
        work = Work(kind, self.request.num_prompt_tokens, transfer_s_per_token, self.request.adapter)
        home = self._home(nodes) if self.request.session else None
        if home is not None:
            return price(home, work, self.cached, self.now, mean_new_tokens(nodes), "session", len(nodes))
        return self.policy.choose(work, nodes, self.cached, self.now)

    def _home(self, nodes: Sequence[NodeView]) -> NodeView | None:
        """The node that the session likes best, if it is neither full nor behind the others."""
        home = home_of(self.request.session, nodes)
        ahead = min(node.idle_at for node in nodes)
        if home.backlog_s(self.now) > max(0.0, ahead - self.now) + SESSION_PATIENCE_S:
            return None
        tail = self.request.num_prompt_tokens - self.cached.get(home.key, 0)
        return home if home.free_tokens >= tail else None
