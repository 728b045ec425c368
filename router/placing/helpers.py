"""Which idle nodes may compute parts of a long prompt beside the node that it was placed on. Pure.

Only nodes that have nothing else to do are named, so nobody waits for a prompt that is not his; what each of them
computes is decided by the node that has the prompt (docs/pipelined_prompts.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.router.placing.elastic_finder import told_of
from tandem.router.placing.placement import Placement, PlacementRequest
from tandem.router.placing.prefix_source import keeps_blocks
from tandem.router.placing.siblings import Told
from tandem.router.placing.view import NodeView

# A shorter tail is computed sooner than two nodes have agreed on it.
LEAST_TOKENS = 4096  # a guess


def with_helpers(
    placement: Placement, request: PlacementRequest, nodes: Sequence[NodeView], most_nodes: int
) -> tuple[Placement, list[tuple[NodeView, Told]]]:
    """(`placement` with helpers, at most `most_nodes` with the node that computes the prompt; what to count of each
    node that it names)."""
    helpers = find_helpers(placement, request, nodes, most_nodes)
    num_tokens = placement.choices[-1].num_new_tokens // (len(helpers) + 1)
    placement = msgspec.structs.replace(placement, helpers=tuple(view.ref for view in helpers))
    counted = [(view, Told(view.tag, num_tokens, 1, 0, 0, 0)) for view in helpers]
    nodes = [choice.node for choice in placement.choices]
    return placement, [*counted, *zip(nodes, told_of(placement, request), strict=True)]


def find_helpers(
    placement: Placement, request: PlacementRequest, nodes: Sequence[NodeView], most_nodes: int
) -> list[NodeView]:
    """The helpers of the node that computes the prompt, at most `most_nodes` with that node itself; none, unless that
    is idle, too, or for a request whose nodes have failed."""
    if most_nodes < 2 or request.avoid or request.prompt_logprobs or request.is_precise or placement.prefix is not None:
        return []
    choice = placement.choices[-1]
    if choice.num_new_tokens < LEAST_TOKENS or not _is_idle(choice.node):
        return []
    able = [node for node in nodes if node is not choice.node and _is_idle(node) and _may_help(choice.node, node)]
    able = [node for node in able if node.free_tokens > request.num_prompt_tokens]
    return sorted(able, key=lambda node: (node.num_new_tokens, node.info.node_id))[: most_nodes - 1]


def _is_idle(node: NodeView) -> bool:
    return node.usable and not node.silent and node.num_sequences == 0


def _may_help(node: NodeView, peer: NodeView) -> bool:
    """Whether the peer's work is this node's kind of work, and layers reach it while they are computed."""
    ours, theirs = node.info, peer.info
    one_gpu = ours.layout is not None and ours.layout.tp_size == 1
    return ours.role == theirs.role and ours.host_id == theirs.host_id and one_gpu and keeps_blocks(node, peer)
