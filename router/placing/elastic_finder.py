"""Which nodes serve a request by the elastic rule: its `Plan` as a `Placement`. Pure; docs/elastic.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Targets
from tandem.router.placing.elastic import ElasticPlacement, Fleet, Plan, Roads, Task
from tandem.router.placing.outlook import Outlook
from tandem.router.placing.placement import (
    HANDOVER_S,
    Placement,
    PlacementRequest,
    fitting,
    home_of,
    mean_transfer_s,
    with_prefix,
)
from tandem.router.placing.policies import Choice, Work, price
from tandem.router.placing.siblings import Told
from tandem.router.placing.view import TRANSFER_SHARE, NodeView

# A prompt that is handed over between nodes that do all work is no larger than this share of either's pool, or each
# might have promised the other what it needs itself.
MOST_OF_POOL = 0.25  # docs/blocks.md: beside what is promised, half of it, and parked, a quarter
# What is counted of a placement, whatever nodes report.
MOST_TOKENS, MOST_S = 1 << 31, 1e6  # guesses
WHY = "elastic"
ALONE = ElasticPlacement(1)


def find_elastic(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    cached_tokens: Mapping[NodeKey, int],
    now: float,
    rule: ElasticPlacement = ALONE,
) -> Placement | None:
    """The cheapest plan as a placement. None: the rule can't say, since a node doesn't report its work, or no node
    takes it."""
    if any(node.outlook is None for node in nodes if node.usable):
        return None
    cached = {} if request.prompt_logprobs else cached_tokens
    preferred = [node for node in nodes if node.key not in request.avoid]
    for candidates in (preferred, nodes) if request.avoid else (nodes,):
        asked = _asked(request, candidates, cached)
        plan = None if asked is None else rule.find(*asked, cached, now)
        if plan is not None:
            return with_prefix(_placement(plan, request, candidates, cached, now), candidates, cached, request)
    return None


def told_of(placement: Placement, request: PlacementRequest) -> list[Told]:
    """What to count of a placement, choice by choice."""
    found, plan = [], placement.plan
    for choice in placement.choices:
        num_tokens, node, due_s = choice.num_computed_tokens, choice.node, 0.0
        if plan is not None and node.outlook is not None and choice.kind != "tokens":
            num_tokens, due_s = min(round(plan.share_s / node.outlook.s_per_token), MOST_TOKENS), plan.due_s
        elif node.outlook is not None:
            due_s = request.targets.or_else(node.outlook.report.targets).ttft_s
        num_streams = 0 if choice.kind == "prompt" else request.num_samples
        due_ms = round(1e3 * min(due_s, MOST_S))
        told = Told(node.tag, num_tokens, request.num_samples, choice.num_new_tokens, num_streams, due_ms)
        found.append(told._replace(num_stream_tokens=num_streams * request.num_prompt_tokens))
    return found


def told_helpers(placement: Placement, nodes: Sequence[NodeView]) -> list[tuple[NodeView, Told]]:
    """What to count of the nodes that help, by the plan."""
    plan, found = placement.plan, []
    helpers = () if plan is None else plan.computing[1:]
    for node in nodes:
        if plan is not None and node.key in helpers and node.outlook is not None:
            num_tokens = min(round(plan.share_s / node.outlook.s_per_token), MOST_TOKENS)
            found.append((node, Told(node.tag, num_tokens, 1, 0, 0, round(1e3 * min(plan.due_s, MOST_S)))))
    return found


def plans(
    request: PlacementRequest,
    nodes: Sequence[NodeView],
    cached: Mapping[NodeKey, int],
    now: float,
    rule: ElasticPlacement = ALONE,
) -> list[Plan]:
    """The plans that the rule would choose from, cheapest first; none where it doesn't place."""
    if any(node.outlook is None for node in nodes if node.usable):
        return []
    asked = _asked(request, nodes, cached)
    return [] if asked is None else rule.plans(*asked, cached, now)


def _asked(
    request: PlacementRequest, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int]
) -> tuple[Task, Fleet] | None:
    prefills, decoders = fitting(request, nodes)
    ends_at_once = request.max_tokens == 1 and request.num_samples == 1 and not request.prompt_logprobs
    moves = not (request.prompt_logprobs or request.is_precise or ends_at_once)
    outlooks = [node.outlook for node in decoders if node.outlook is not None]
    sources = [node for node in prefills if node.outlook is not None]
    computing = [*outlooks, *(node.outlook for node in sources if node.outlook is not None)]
    if not computing:
        return None
    fleet = Fleet(
        computing,
        computing if ends_at_once else outlooks,
        _roads([*prefills, *decoders]),
        stays=frozenset(node.key for node in decoders if node.role == "decode" or _is_large(request, node)),
        leanings={node.key: node.leaning for node in (*sources, *decoders)},
        takes_none=frozenset(node.key for node in decoders if node.role == "unified" and _is_large(request, node)),
        kinds={node.key: node.kind for node in (*prefills, *decoders)},
    )
    mark = request.adapter
    adapter_s = {node.key: node.adapter_s(mark) for node in (*prefills, *decoders)} if mark else {}
    homes = _homes(request.session, prefills, decoders) if request.session and not cached else frozenset()
    return Task(
        request.num_prompt_tokens, *_promised(request, computing), moves, request.may_be_shared, homes, adapter_s
    ), fleet


def _homes(session: str, prefills: Sequence[NodeView], decoders: Sequence[NodeView]) -> frozenset[NodeKey]:
    """Where to look for what a session had, when no directory tells: what it likes best of each kind of nodes."""
    return frozenset(home_of(session, nodes).key for nodes in (prefills, decoders) if nodes)


def _is_large(request: PlacementRequest, node: NodeView) -> bool:
    status = node.status
    return bool(status.num_blocks) and request.num_prompt_tokens > MOST_OF_POOL * status.num_blocks * status.block_size


def _promised(request: PlacementRequest, outlooks: Sequence[Outlook]) -> tuple[float, float]:
    """Seconds until the first token, of which some have passed, and for each token after it."""
    targets: Targets = request.targets
    for outlook in outlooks:
        targets = targets.or_else(outlook.report.targets)
    return max(0.0, targets.ttft_s - request.waited_s), targets.tpot_s


def _roads(nodes: Sequence[NodeView]) -> Roads:
    """What moving takes, by what nodes have measured."""
    mean_s = sum(node.prefill_s_per_token for node in nodes) / len(nodes)
    fetches = [node.fetch_s_per_token for node in nodes if node.fetch_gain_s_per_token]
    fetch_s = sum(fetches) / len(fetches) if fetches else 0.0
    return Roads(HANDOVER_S, mean_transfer_s(nodes) or TRANSFER_SHARE * mean_s, fetch_s)


def _placement(
    plan: Plan, request: PlacementRequest, nodes: Sequence[NodeView], cached: Mapping[NodeKey, int], now: float
) -> Placement:
    by_key = {node.key: node for node in nodes}
    computing, decoding = by_key[plan.computing[0]], by_key[plan.decoding]
    num_tokens, how = request.num_prompt_tokens, ", pulls" if plan.peer is not None else ""
    helpers = tuple(by_key[key].ref for key in plan.computing[1:])
    how += ", shared" if helpers else ""
    work = Work("all", num_tokens, adapter=request.adapter)
    if computing is decoding:
        choice = price(computing, work, cached, now, 0.0, WHY, len(nodes))
        choices: tuple[Choice, ...] = (_pulling(choice, plan),)
        return Placement(computing.ref, None, f"elastic: stays{how}", choices, plan=plan, helpers=helpers)
    prompt = price(computing, msgspec.structs.replace(work, kind="prompt"), cached, now, 0.0, WHY, len(nodes))
    taken_over = Work("tokens", num_tokens, mean_transfer_s([computing]), request.adapter)
    tokens = price(decoding, taken_over, cached, now, 0.0, WHY, len(nodes))
    choices = (tokens, _pulling(prompt, plan))
    return Placement(decoding.ref, computing.ref, f"elastic: hands over{how}", choices, plan=plan, helpers=helpers)


def _pulling(choice: Choice, plan: Plan) -> Choice:
    """The choice without what it would fetch, where the plan pulls nothing."""
    if plan.peer is not None or not choice.num_fetched_tokens:
        return choice
    compute_s = choice.num_new_tokens * choice.node.prefill_s_per_token
    return msgspec.structs.replace(choice, num_fetched_tokens=0, transfer_s=0.0, compute_s=compute_s)
