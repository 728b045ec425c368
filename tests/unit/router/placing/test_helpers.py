"""Who helps to compute a long prompt: nodes of the same kind and host without prompts, where somebody gains."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, LayerPlace, ModelIdentity
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Role, Targets
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.helpers import find_helpers, with_helpers
from tandem.router.placing.placement import PlacementRequest, find_placement
from tandem.router.placing.policies import make_policy
from tandem.router.placing.view import NodeView

LEAST_TOKENS = 4096
LAYOUT = KVLayout((KVGroup(2, 2, 8, "float32"),), 64)
LONG = PlacementRequest(num_prompt_tokens=2 * LEAST_TOKENS, max_tokens=64)


def node(
    name: str,
    role: Role = "unified",
    host: str = "here",
    layout: KVLayout = LAYOUT,
    way: str = "shm",
    num_ranks: int = 1,
    **status: Any,
) -> NodeView:
    identity = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
    info = NodeInfo(
        node_id=name, epoch=1, role=role, identity=identity, layout=layout, num_ranks=num_ranks, host_id=host,
        transports={way: b""},
    )  # fmt: skip
    free = {"num_free_blocks": 1000, "num_blocks": 1000, "block_size": 64, **status}
    return NodeView(info, Status(node_id=name, epoch=1, **free))


def up_to(num_nodes: int) -> RouterOptions:
    return RouterOptions("model", prefill_nodes_per_prompt=num_nodes, prefill_shared_tokens=LEAST_TOKENS)


def helpers(nodes: list[NodeView], request: PlacementRequest = LONG, most: int = 4, cached: int = 0) -> list[str]:
    held = {nodes[0].key: cached} if cached else {}
    placement = find_placement(request, nodes, held, 256, make_policy("prefix_aware"), 0.0)
    assert placement is not None
    assert placement.choices[-1].node is nodes[0]
    return [view.info.node_id for view in find_helpers(placement, request, nodes, up_to(most), 0.0)[0]]


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
        node("b", way="tcp"),
        node("b", num_ranks=2),
    ],
)
def test_others_do_not(other: NodeView) -> None:
    assert helpers([node("a"), other]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt_tokens": LEAST_TOKENS - 1},
        {"avoid": frozenset({NodeKey("x", 1)})},
        {"goes_alone": True},
        {"prompt_logprobs": True},
    ],
)
def test_some_prompts_are_one_nodes(changes: dict[str, Any]) -> None:
    nodes = [node("a"), node("b")]
    assert helpers(nodes, msgspec.structs.replace(LONG, **changes)) == []


def test_a_node_of_several_ranks_computes_alone() -> None:
    assert helpers([node("a", num_ranks=2), node("b", num_ranks=2)]) == []


def test_a_node_with_a_block_table_for_each_kind_of_layer_computes_alone() -> None:
    places = (LayerPlace(0, 0), LayerPlace(1, 0))
    hybrid = KVLayout((KVGroup(1, 2, 8, "float32", window=64, places=places),), 64)
    assert helpers([node("a", layout=hybrid), node("b", layout=hybrid)]) == []


def test_what_is_cached_needs_no_help() -> None:
    assert helpers([node("a"), node("b")], cached=LEAST_TOKENS + 64) == []


def test_a_node_with_work_computes_alone() -> None:
    assert helpers([node("a", num_running=1), node("b", num_running=2)]) == []


def test_prefill_nodes_help_prefill_nodes() -> None:
    nodes = [node("a", role="prefill"), node("b", role="prefill"), node("d", role="decode")]
    assert helpers(nodes) == ["b"]


def streaming(name: str, prompts: tuple = (), ttft_s: float = 2.0) -> NodeView:
    """A node with a stream that reports its work: 8192 tokens take it 0.8 s."""
    work = NodeReport(1e-4, 1e-4, prompts=prompts, num_streams=1, targets=Targets(ttft_s, 0.025, 0.0))
    return node(name, work=work, num_running=1 + len(prompts), prefill_s_per_token=1e-4)


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([streaming("a", ttft_s=0.5), streaming("b", ttft_s=0.5)], ["b"]),
        ([streaming("a", ttft_s=0.5), streaming("b", ttft_s=0.5, prompts=((0.5, 100),))], ["b"]),
        ([streaming("a", ttft_s=0.5), streaming("b", ttft_s=0.5, prompts=((0.5, 4_900),))], []),
        ([streaming("a"), streaming("b")], []),
    ],
)
def test_nodes_with_streams_help_where_somebody_would_be_late(nodes: list[NodeView], named: list[str]) -> None:
    assert helpers(nodes) == named


def test_what_is_foreseen_is_told_and_counted() -> None:
    nodes = [streaming("a", ttft_s=0.5), streaming("b", ttft_s=0.5)]
    alone = find_placement(LONG, nodes, {}, 256, make_policy("prefix_aware"), 0.0)
    assert alone is not None
    assert with_helpers(alone, LONG, nodes, up_to(1), 0.0)[0] is alone, "nothing is copied where nobody helps"
    placement, counted = with_helpers(alone, LONG, nodes, up_to(2), 0.0)
    assert placement.reason == f"{alone.reason}, shared"
    assert "helped by b; first_token=409.6ms alone=819.2ms late=0 alone=1" in placement.explanation()
    assert {view.info.node_id: told.num_tokens for view, told in counted} == {"a": 4096, "b": 4096}
