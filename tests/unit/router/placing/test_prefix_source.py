"""Whom the router tells a node to pull a prefix from: the peer that saves most time, by rates of just that pair."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Role
from tandem.router.placing.placement import Placement, PlacementRequest, find_placement, offers
from tandem.router.placing.policies import make_policy
from tandem.router.placing.view import PREFILL_S_PER_TOKEN, NodeView

FAST = PREFILL_S_PER_TOKEN / 10
LAYOUT = KVLayout((KVGroup(2, 2, 8, "float32"),), 64)
REQUEST = PlacementRequest(num_prompt_tokens=8192, max_tokens=64)


def node(name: str, role: Role = "unified", layout: KVLayout = LAYOUT, **status: Any) -> NodeView:
    identity = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
    info = NodeInfo(node_id=name, epoch=1, role=role, control_address=f"tcp://{name}", identity=identity, layout=layout)
    full = {"num_free_blocks": 100_000, "num_blocks": 100_000, "block_size": 64, "fetch_s_per_token": FAST, **status}
    return NodeView(info, Status(node_id=name, epoch=1, **full))


def place(nodes: list[NodeView], cached: dict[NodeKey, int], request: PlacementRequest = REQUEST) -> Placement:
    placement = find_placement(request, nodes, cached, 256, make_policy("prefix_aware"), 0.0)
    assert placement is not None
    return placement


def busy(name: str, **changes: Any) -> NodeView:
    return node(name, num_waiting_tokens=400_000, **changes)


def test_the_longest_prefix_is_taken_where_all_ways_are_equal() -> None:
    placement = place([node("a"), busy("b"), busy("c")], {("b", 1): 2048, ("c", 1): 6144})
    assert placement.primary.node_id == "a"
    assert placement.prefix is not None
    assert (placement.prefix.peer.node_id, placement.prefix.num_tokens) == ("c", 6144)
    (choice,) = placement.choices
    assert (choice.num_fetched_tokens, choice.num_computed_tokens) == (6144, 2048)
    assert choice.transfer_s == pytest.approx(6144 * FAST)
    assert "fetched=6144 from=c" in placement.explanation()


def test_a_slow_way_is_left_for_a_shorter_prefix() -> None:
    asker = node("a", fetch_s_per_token_from={"c": 0.9 * PREFILL_S_PER_TOKEN})
    placement = place([asker, busy("b"), busy("c")], {("b", 1): 4096, ("c", 1): 6144})
    assert placement.prefix is not None
    assert placement.prefix.peer.node_id == "b"
    assert placement.choices[0].num_fetched_tokens == 4096


@pytest.mark.parametrize(
    ("asker", "holder", "cached"),
    [
        (node("a", fetch_s_per_token=0.0), busy("b"), 6144),
        (node("a", fetch_s_per_token=2 * PREFILL_S_PER_TOKEN), busy("b"), 6144),
        (node("a", fetch_s_per_token_from={"b": 2 * PREFILL_S_PER_TOKEN}), busy("b"), 6144),
        (node("a"), busy("b"), 64),
        (node("a"), busy("b", layout=msgspec.structs.replace(LAYOUT, block_size=128)), 6144),
        (node("a"), busy("b", layout=KVLayout((KVGroup(2, 2, 8, "bfloat16"),), 64)), 6144),
    ],
    ids=["does-not-fetch", "fetches-slowly", "slowly-from-there", "too-little", "other-blocks", "other-numbers"],
)
def test_what_does_not_pay_or_can_not_be_is_computed(asker: NodeView, holder: NodeView, cached: int) -> None:
    placement = place([asker, holder], {("b", 1): cached})
    assert placement.primary.node_id == "a"
    assert placement.prefix is None
    assert placement.choices[0].num_computed_tokens == REQUEST.num_prompt_tokens
    assert placement.choices[0].num_fetched_tokens == 0


def test_a_prefill_node_may_pull_from_a_decode_node_and_what_it_has_counts() -> None:
    nodes = [node("p", "prefill"), node("d", "decode"), node("e", "decode", num_running=60)]
    placement = place(nodes, {("p", 1): 1024, ("e", 1): 5120, ("d", 1): 64})
    assert placement.prefill is not None
    assert placement.prefix is not None
    assert placement.prefix.peer.node_id == "e"
    assert placement.choices[-1].num_fetched_tokens == 5120 - 1024


def test_offers_name_the_holder() -> None:
    shown = {each.node.info.node_id: each for each in offers(REQUEST, [node("a"), busy("b")], {("b", 1): 6144}, 0.0)}
    assert (shown["a"].holder, shown["a"].num_fetched_tokens) == ("b", 6144)
    assert (shown["b"].holder, shown["b"].num_fetched_tokens) == ("", 0)
