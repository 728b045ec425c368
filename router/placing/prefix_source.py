"""Which peer the chosen node is to pull a prompt's prefix from, and whether that is worth the while. Pure.

A node gains, with each token that it pulls, what computing it takes there beyond what pulling takes: both as the node
has measured them, the latter from just that peer where it has pulled from it before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import PrefixHint
from tandem.router.placing.policies import Choice
from tandem.router.placing.view import NodeView

# What a pull takes besides its bytes: question, claim, grant, each at the next turn of a step loop.
PULL_OVERHEAD_S = 0.005  # a guess


def with_holder(
    choice: Choice, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], num_prompt_tokens: int
) -> tuple[Choice, PrefixHint | None]:
    """(`choice`, corrected to what the best single peer can give; where to pull that from, or None). It was made
    with the most that any peer holds."""
    if not choice.num_fetched_tokens:
        return choice, None
    holder = best_holder(choice.node, nodes, cached, num_prompt_tokens)
    fetched = rate = 0.0
    if holder is not None:
        fetched = min(cached[holder.key], num_prompt_tokens - 1) - choice.num_cached_tokens
        rate = pull_s_per_token(choice.node, holder)
    choice = msgspec.structs.replace(
        choice,
        num_fetched_tokens=int(fetched),
        transfer_s=fetched * rate,
        compute_s=(choice.num_new_tokens - fetched) * choice.node.prefill_s_per_token,
        holder="" if holder is None else holder.info.node_id,
    )
    return choice, None if holder is None else PrefixHint(holder.ref, cached[holder.key])


def best_holder(
    node: NodeView, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], num_prompt_tokens: int
) -> NodeView | None:
    """The peer that saves `node` most time; None when none saves more than asking costs."""
    best, most = None, PULL_OVERHEAD_S
    held, by_peer = cached.get(node.key, 0), node.status.fetch_s_per_token_from
    gain = node.prefill_s_per_token - node.fetch_s_per_token
    for peer in nodes:
        tokens = cached.get(peer.key, 0)
        if tokens > held:
            tokens = min(tokens, num_prompt_tokens - 1) - held
            one_way = by_peer.get(peer.info.node_id)
            saved = tokens * (gain if one_way is None else node.prefill_s_per_token - one_way)
            if saved > most and not peer.lost and keeps_blocks(node, peer):
                best, most = peer, saved
    return best


def pull_s_per_token(node: NodeView, peer: NodeView) -> float:
    return node.status.fetch_s_per_token_from.get(peer.info.node_id) or node.fetch_s_per_token


def keeps_blocks(node: NodeView, peer: NodeView) -> bool:
    """Whether blocks can be pulled as they are: both nodes keep the same numbers in blocks of the same size."""
    ours, theirs = node.info.layout, peer.info.layout
    same_blocks = ours is theirs or (
        ours is not None
        and theirs is not None
        and (ours.block_size, ours.groups, ours.tp_size) == (theirs.block_size, theirs.groups, 1)
    )
    return node.model == peer.model and same_blocks
