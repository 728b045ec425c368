"""Which nodes serve a request: pure policy over a snapshot of the nodes.

A decode node D and a prefill node P, or D alone when the tail that it has not cached is short, or P alone when the
first token ends the request. Unified nodes do both halves. Costs are counted in prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.engine.messages import NodeInfo, PeerRef, Status

NodeKey = tuple[str, int]  # (node_id, epoch)

# What one running or waiting sequence costs others on a node, as prompt tokens.
SEQUENCE_COST_TOKENS = 64
# Moving a token's KV from a prefill node is cheaper than computing it, but not free.
TRANSFER_COST = 0.25
# A node without room for the prompt makes it wait; any other node is better, however busy.
NO_ROOM_COST_TOKENS = 1 << 20


def node_key(ref: PeerRef) -> NodeKey:
    return ref.node_id, ref.epoch


@dataclass(slots=True)
class NodeView:
    """A connected node as the router sees it: its last Status and the placements that Status doesn't show yet."""

    info: NodeInfo
    status: Status
    # ping sequence that was current when placed -> (prompt tokens to compute there, sequences)
    unseen: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost: bool = False

    @property
    def key(self) -> NodeKey:
        return self.info.node_id, self.info.epoch

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.info.node_id, self.info.epoch, self.info.control_address)

    @property
    def usable(self) -> bool:
        return not self.lost and not self.status.draining

    @property
    def queued_tokens(self) -> int:
        return self.status.num_waiting_tokens + sum(tokens for tokens, _ in self.unseen.values())

    @property
    def num_sequences(self) -> int:
        return self.status.num_running + self.status.num_waiting + self.num_unseen

    @property
    def num_unseen(self) -> int:
        return sum(count for _, count in self.unseen.values())

    def note_placement(self, ping_sequence: int, num_tokens: int, num_sequences: int) -> None:
        tokens, sequences = self.unseen.get(ping_sequence, (0, 0))
        self.unseen[ping_sequence] = tokens + num_tokens, sequences + num_sequences

    def note_status(self, status: Status) -> None:
        """A node's step loop publishes its load a moment after its I/O thread took a message, so a placement counts
        as shown only by the answer to the second ping after it."""
        self.status = status
        self.unseen = {sent: load for sent, load in self.unseen.items() if sent + 2 > status.sequence}


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    num_prompt_tokens: int
    max_tokens: int
    num_samples: int = 1
    prompt_logprobs: bool = False  # computed without the cache and without a hand-off
    avoid: frozenset[NodeKey] = frozenset()  # nodes that failed this request; taken only when there is no other


@dataclass(frozen=True, slots=True)
class Placement:
    primary: PeerRef  # makes the tokens
    prefill: PeerRef | None  # computes the prompt and hands its KV to the primary; None: the primary does all
    reason: str


def find_placement(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    cached_tokens: Mapping[NodeKey, int],
    local_tail_tokens: int,
) -> Placement | None:
    """The cheapest choice, or None when no set of usable nodes can serve the request now.

    `cached_tokens`: leading prompt tokens that a node holds, per node; absent means none or unknown.
    """
    usable = [node for node in nodes if node.usable]
    preferred = [node for node in usable if node.key not in request.avoid]
    return _place(request, preferred, cached_tokens, local_tail_tokens) or _place(
        request, usable, cached_tokens, local_tail_tokens
    )


def _place(
    request: PlacementRequest, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], local_tail_tokens: int
) -> Placement | None:
    prefills = [node for node in nodes if node.info.role == "prefill"]
    decoders = [node for node in nodes if node.info.role in ("decode", "unified")]
    if request.max_tokens == 1 and request.num_samples == 1 and prefills and not request.prompt_logprobs:
        unified = [node for node in decoders if node.info.role == "unified"]
        node = _cheapest([*prefills, *unified], lambda n: _compute_cost(n, request, cached))
        return Placement(node.ref, None, "the first token ends it")
    if not decoders:
        return None
    decode = _cheapest(decoders, lambda n: _decode_cost(n, request, cached, bool(prefills)))
    if decode.info.role == "unified":
        return Placement(decode.ref, None, "unified node")
    if request.prompt_logprobs:
        return Placement(decode.ref, None, "prompt logprobs are computed where the tokens are")
    if _tail(decode, request, cached) <= local_tail_tokens:
        return Placement(decode.ref, None, "short uncached tail")
    partners = [node for node in prefills if node.info.identity == decode.info.identity]
    if not partners:
        return Placement(decode.ref, None, "no prefill node")
    prefill = _cheapest(partners, lambda n: _compute_cost(n, request, cached))
    return Placement(decode.ref, prefill.ref, "prefill and decode")


def _cheapest(nodes: Iterable[NodeView], cost: Callable[[NodeView], float]) -> NodeView:
    return min(nodes, key=lambda node: (cost(node), node.num_unseen, node.info.node_id))


def _tail(node: NodeView, request: PlacementRequest, cached: Mapping[NodeKey, int]) -> int:
    """Prompt tokens that the node would have to get from somewhere; the last one is always computed."""
    if request.prompt_logprobs:
        return request.num_prompt_tokens
    return max(1, request.num_prompt_tokens - cached.get(node.key, 0))


def _compute_cost(node: NodeView, request: PlacementRequest, cached: Mapping[NodeKey, int]) -> float:
    return node.queued_tokens + _tail(node, request, cached)


def _decode_cost(
    node: NodeView, request: PlacementRequest, cached: Mapping[NodeKey, int], prefill_exists: bool
) -> float:
    tail = _tail(node, request, cached)
    computes = node.info.role == "unified" or not prefill_exists
    cost = SEQUENCE_COST_TOKENS * node.num_sequences + (node.queued_tokens + tail if computes else TRANSFER_COST * tail)
    free_tokens = node.status.num_free_blocks * node.status.block_size
    if node.status.num_blocks and free_tokens < tail:
        cost += NO_ROOM_COST_TOKENS
    return cost
