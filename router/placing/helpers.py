"""Which nodes may compute chunks of a long prompt in turn with the node that it was placed on, and whether they should.
Pure.

Where nodes report their work other prompts and streams are no hindrance: the prompt is spread if somebody would be late
without that and it costs less, all counted as elastic placement does, which decides both at once where it places. Nodes
without anything to do help in any case. Which chunk is whose is decided by the node that has the prompt
(docs/pipelined_prompts.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.engine.contracts.config import RouterOptions
from tandem.router.placing.elastic import ElasticPlacement, Spread, Task
from tandem.router.placing.elastic_finder import told_helpers, told_of
from tandem.router.placing.placement import Placement, PlacementRequest
from tandem.router.placing.siblings import Told
from tandem.router.placing.view import NodeView


def with_helpers(
    placement: Placement, request: PlacementRequest, nodes: Sequence[NodeView], options: RouterOptions, now: float
) -> tuple[Placement, list[tuple[NodeView, Told]]]:
    """(`placement` with helpers, if any; what to count of each node that it names). A plan of the elastic rule names
    them already."""
    chosen = list(zip((choice.node for choice in placement.choices), told_of(placement, request), strict=True))
    if placement.plan is not None:
        return placement, [*told_helpers(placement, nodes), *chosen]
    helpers, spread = find_helpers(placement, request, nodes, options, now)
    if not helpers:
        return placement, chosen
    num_nodes, due_ms = len(helpers) + 1, 0 if spread is None else round(1e3 * spread.due_s)
    num_tokens = placement.choices[-1].num_new_tokens // num_nodes
    node, told = chosen[-1]
    chosen[-1] = node, told._replace(num_tokens=told.num_tokens // num_nodes)
    counted = [(view, Told(view.tag, num_tokens, 1, 0, 0, due_ms)) for view in helpers]
    refs, reason = tuple(view.ref for view in helpers), f"{placement.reason}, shared"
    return msgspec.structs.replace(placement, reason=reason, helpers=refs, spread=spread), [*counted, *chosen]


def find_helpers(
    placement: Placement, request: PlacementRequest, nodes: Sequence[NodeView], options: RouterOptions, now: float
) -> tuple[list[NodeView], Spread | None]:
    """(The helpers of the node that computes the prompt; what is foreseen, if anything). Where nodes don't report
    their work neither they nor that node have any; a request whose nodes have failed gets none."""
    choice, least = placement.choices[-1], options.prefill_shared_tokens
    most_nodes = min(options.prefill_nodes_per_prompt, max(1, 2 * choice.num_new_tokens // least))
    if most_nodes < 2 or not request.may_be_shared or placement.prefix is not None:
        return [], None
    if choice.num_new_tokens < least or not _may_share(choice.node) or choice.node.kind is None:
        return [], None
    able = [each for each in nodes if each is not choice.node and _may_share(each) and each.kind == choice.node.kind]
    able = [each for each in able if each.free_tokens > request.num_prompt_tokens]
    able.sort(key=lambda each: (each.num_sequences, each.num_new_tokens, each.info.node_id))
    idle = [] if choice.node.num_sequences else [each for each in able if not each.num_sequences]
    lead = choice.node.outlook
    if lead is None:
        return idle[: most_nodes - 1], None
    targets = request.targets.or_else(lead.report.targets)
    task = Task(request.num_prompt_tokens, max(0.0, targets.ttft_s - request.waited_s), targets.tpot_s)
    num_cached = request.num_prompt_tokens - choice.num_new_tokens
    for others in (able, idle):
        outlooks = [each.outlook for each in others if each.outlook is not None]
        spread = ElasticPlacement(most_nodes).spread(task, lead, outlooks, num_cached, now)
        if spread is not None and (spread.num_late_alone or others is idle):
            by_key = {each.key: each for each in others}
            return [by_key[key] for key in spread.helpers], spread
    return [], None


def _may_share(node: NodeView) -> bool:
    """Whether it may take part: with prompts it declines unless it orders them by deadlines, as nodes do that report
    their work."""
    return node.usable and not node.silent and (node.num_sequences == 0 or node.outlook is not None)
