"""Who may help to compute a long prompt: idle nodes of the same kind and host, and nobody else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Role
from tandem.router.placing.helpers import LEAST_TOKENS, find_helpers
from tandem.router.placing.placement import PlacementRequest, find_placement
from tandem.router.placing.policies import make_policy
from tandem.router.placing.view import NodeView

LAYOUT = KVLayout((KVGroup(2, 2, 8, "float32"),), 64)
LONG = PlacementRequest(num_prompt_tokens=2 * LEAST_TOKENS, max_tokens=64)


def node(name: str, role: Role = "unified", host: str = "here", layout: KVLayout = LAYOUT, **status: Any) -> NodeView:
    identity = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
    info = NodeInfo(node_id=name, epoch=1, role=role, identity=identity, layout=layout, host_id=host)
    free = {"num_free_blocks": 1000, "num_blocks": 1000, "block_size": 64, **status}
    return NodeView(info, Status(node_id=name, epoch=1, **free))


def helpers(nodes: list[NodeView], request: PlacementRequest = LONG, most: int = 4, cached: int = 0) -> list[str]:
    held = {nodes[0].key: cached} if cached else {}
    placement = find_placement(request, nodes, held, 256, make_policy("prefix_aware"), 0.0)
    assert placement is not None
    assert placement.choices[-1].node is nodes[0]
    return [view.info.node_id for view in find_helpers(placement, request, nodes, most)]


def test_idle_nodes_help_up_to_the_number_that_is_allowed() -> None:
    nodes = [node(name) for name in "abcd"]
    assert helpers(nodes) == ["b", "c", "d"]
    assert helpers(nodes, most=3) == ["b", "c"]
    assert helpers(nodes, most=1) == []


@pytest.mark.parametrize(
    "other",
    [
        node("b", num_running=1),
        node("b", num_waiting=1),
        node("b", draining=True),
        node("b", role="decode"),
        node("b", host="there"),
        node("b", layout=KVLayout((KVGroup(2, 2, 8, "float32"),), 32)),
        node("b", num_free_blocks=100),
    ],
)
def test_others_do_not(other: NodeView) -> None:
    assert helpers([node("a"), other]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt_tokens": LEAST_TOKENS - 1},
        {"avoid": frozenset({NodeKey("x", 1)})},
        {"prompt_logprobs": True},
    ],
)
def test_some_prompts_are_one_nodes(changes: dict[str, Any]) -> None:
    nodes = [node("a"), node("b")]
    assert helpers(nodes, msgspec.structs.replace(LONG, **changes)) == []


def test_what_is_cached_needs_no_help() -> None:
    assert helpers([node("a"), node("b")], cached=LEAST_TOKENS + 64) == []


def test_a_node_with_work_computes_alone() -> None:
    assert helpers([node("a", num_running=1), node("b", num_running=2)]) == []


def test_prefill_nodes_help_prefill_nodes() -> None:
    nodes = [node("a", role="prefill"), node("b", role="prefill"), node("d", role="decode")]
    assert helpers(nodes) == ["b"]
