"""The elastic rule over nodes as a router sees them: who may do what, what is counted, when it can't say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.wire.adapters import HeldAdapters
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Targets
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.elastic import ElasticPlacement
from tandem.router.placing.elastic_finder import find_elastic, plans, told_of
from tandem.router.placing.fleet_need import spare_share
from tandem.router.placing.helpers import with_helpers
from tandem.router.placing.placement import Placement, PlacementRequest
from tandem.router.placing.view import NodeView

TOKEN_S = 1e-4
TARGETS = Targets(2.0, 0.025, 0.0)


def node(
    name: str,
    role: str = "unified",
    prompts: tuple = (),
    num_blocks: int = 10_000,
    num_free: int = 10_000,
    **status: Any,
) -> NodeView:
    work = NodeReport(
        TOKEN_S, TOKEN_S, prompts=prompts, step_s=0.005, targets=TARGETS, free_tokens=64 * min(num_free, num_blocks)
    )
    info = NodeInfo(node_id=name, epoch=1, role=role)  # type: ignore[arg-type]
    status = {"work": work, "num_blocks": num_blocks, "block_size": 64, **status}
    return NodeView(info, Status(node_id=name, epoch=1, prefill_s_per_token=TOKEN_S, **status))


def find(*nodes: NodeView, num_tokens: int = 10_000, cached: dict | None = None, **request: Any) -> Placement | None:
    wanted = PlacementRequest(**{"num_prompt_tokens": num_tokens, "max_tokens": 100, **request})
    return find_elastic(wanted, nodes, cached or {}, 0.0)


def chosen(placement: Placement | None) -> tuple[str, str]:
    """(who computes, who decodes)."""
    assert placement is not None
    return (placement.prefill or placement.primary).node_id, placement.primary.node_id


BUSY = tuple((20.0 + index, 10_000) for index in range(3))


def test_bounded_nodes_do_what_they_are_for() -> None:
    prefill, decode = node("p", "prefill"), node("d", "decode", prompts=BUSY)
    placement = find(prefill, decode)
    assert chosen(placement) == ("p", "d")
    assert placement.reason == "elastic: hands over"
    assert chosen(find(decode, node("d2", "decode", prompts=BUSY[:1]))) == ("d2", "d2"), "it computes what it decodes"
    assert find(prefill) is None


def test_a_decode_node_computes_for_nobody_else() -> None:
    """The idle decode node has no room to decode: it still does not compute for the other."""
    placement = find(node("d", "decode", num_free=0), node("u", prompts=BUSY))
    assert chosen(placement) == ("u", "u")


def test_a_prompt_that_is_large_for_a_pool_stays() -> None:
    """Two nodes that do all work must not promise each other what they need themselves."""
    nodes = node("a"), node("b", "prefill")
    busy = node("u", prompts=BUSY, num_blocks=400)
    assert chosen(find(nodes[1], busy, num_tokens=6_000)) == ("b", "u")
    assert chosen(find(nodes[1], busy, num_tokens=6_500)) == ("u", "u")
    assert chosen(find(nodes[0], busy, num_tokens=6_500)) == ("a", "a")


@pytest.mark.parametrize("request_", [{"prompt_logprobs": True}, {"is_precise": True}])
def test_what_can_not_be_handed_over_is_one_nodes(request_: dict) -> None:
    assert chosen(find(node("p", "prefill"), node("d", "decode", prompts=BUSY), **request_)) == ("d", "d")


def test_a_request_of_one_token_ends_where_it_is_computed() -> None:
    assert chosen(find(node("p", "prefill"), node("d", "decode", prompts=BUSY), max_tokens=1)) == ("p", "p")


def test_nodes_that_failed_it_are_taken_last() -> None:
    first, second = node("a"), node("b", prompts=BUSY)
    assert chosen(find(first, second)) == ("a", "a")
    assert chosen(find(first, second, avoid=frozenset({first.key}))) == ("b", "b")
    assert chosen(find(first, avoid=frozenset({first.key}))) == ("a", "a")


def test_it_can_not_say_where_nodes_do_not_report() -> None:
    assert find(node("a"), node("b", work=None)) is None


def test_a_session_goes_home_until_somebody_is_known_to_hold_its_prompt() -> None:
    nodes = [node(name) for name in "abcdef"]
    homes = {chosen(find(*nodes, session=f"s{index}")) for index in range(40)}
    assert homes == {(name, name) for name in "abcdef"}
    (home, _), *_ = {chosen(find(*nodes, session="mine")) for _ in range(3)}
    other = next(each for each in nodes if each.info.node_id != home)
    assert chosen(find(*nodes, session="mine", cached={other.key: 9_000})) == (other.info.node_id,) * 2


def sharing(name: str, **fields: Any) -> NodeView:
    """A node that layers of other nodes' chunks reach."""
    view = node(name, **fields)
    layout = KVLayout((KVGroup(2, 2, 8, "float32"),), 64)
    info = msgspec.structs.replace(view.info, host_id="here", layout=layout, transports={"shm": b""})
    return NodeView(info, view.status)


def test_a_prompt_is_placed_on_several_nodes_at_once() -> None:
    """Who has one prompt helps, too, where that makes somebody in time; two that have failed it don't."""
    nodes = [sharing("a"), sharing("b", prompts=((9.0, 3_000),)), node("c", prompts=BUSY)]
    request, rule = PlacementRequest(30_000, 100), ElasticPlacement(2)
    placement = find_elastic(request, nodes, {}, 0.0, rule)
    assert placement is not None
    assert chosen(placement) == ("a", "a")
    assert placement.reason == "elastic: stays, shared"
    assert [each.node_id for each in placement.helpers] == ["b"]
    assert "helped by b" in placement.explanation()
    _, counted = with_helpers(placement, request, nodes, RouterOptions("model"), 0.0)
    assert {view.info.node_id: told.num_tokens for view, told in counted} == {"a": 15_000, "b": 15_000}
    assert plans(request, nodes, {}, 0.0, rule)[0] == placement.plan
    again = msgspec.structs.replace(request, avoid=frozenset({nodes[2].key}))
    alone = find_elastic(again, nodes, {}, 0.0, rule)
    assert alone is not None
    assert alone.helpers == ()


def test_what_is_promised_to_the_request_counts_before_what_nodes_promise() -> None:
    busy = node("a", prompts=((1.0, 9_000),)), node("b", prompts=((9.0, 13_000),))
    hurried, patient = find(*busy, targets=Targets(ttft_s=1.5)), find(*busy, targets=Targets(ttft_s=60.0))
    assert hurried is not None
    assert patient is not None
    assert hurried.plan is not None
    assert patient.plan is not None
    assert (hurried.plan.due_s, patient.plan.due_s) == (1.5, 60.0)
    waited = find(*busy, targets=Targets(ttft_s=60.0), waited_s=20.0)
    assert waited is not None
    assert waited.plan is not None
    assert waited.plan.due_s == 40.0


def test_an_adapter_is_read_only_where_that_is_worth_it() -> None:
    mark = b"12345678"
    for read_s, expected in ((0.5, "b"), (0.005, "a")):
        idle = node("a", adapters=HeldAdapters(read_s=read_s))
        holder = node("b", prompts=BUSY, adapters=HeldAdapters(mark, read_s))
        assert chosen(find(idle, holder, num_tokens=1_000)) == ("a", "a")
        placement = find(idle, holder, num_tokens=1_000, adapter=mark)
        assert chosen(placement) == (expected, expected)
        assert placement is not None
        assert ("adapter=5.0ms" in placement.explanation()) == (expected == "a")


def test_both_halves_are_counted() -> None:
    request = PlacementRequest(10_000, 100, num_samples=2)
    placement = find(node("p", "prefill"), node("d", "decode", prompts=BUSY), num_samples=2)
    assert placement is not None
    tokens, prompt = told_of(placement, request)
    assert (tokens.num_tokens, tokens.num_streams) == (0, 2)
    assert (prompt.num_tokens, prompt.num_streams, prompt.due_ms) == (10_000, 0, 2_000)
    text = placement.explanation()
    assert text.startswith("elastic: hands over; cost=")
    assert "late=0" in text
    assert text.isascii()


def test_a_report_is_read_by_its_age() -> None:
    """What was placed before it was made is in it; what is due is due from then on."""
    view = node("a")
    assert view.outlook is not None
    view.outlook.note_placement(5_000, 9.0, 1, 1.0)
    view.outlook.note_placement(3_000, 9.0, 1, 2.0)
    work = NodeReport(TOKEN_S, TOKEN_S, prompts=((0.5, 5_000),), num_streams=1)
    view.note_status(Status(node_id="a", epoch=1, work=work, age_s=0.2), 2.1)
    assert view.outlook.num_streams == 2
    assert view.outlook.backlog_s(1.9) == pytest.approx(0.8)
    assert view.outlook.without(1.9).num_late == 0


def test_all_plans_can_be_shown_the_cheapest_first() -> None:
    nodes = node("p", "prefill"), node("u", prompts=BUSY)
    request = PlacementRequest(10_000, 100)
    found = plans(request, nodes, {}, 0.0)
    assert [plan.cost_s for plan in found] == sorted(plan.cost_s for plan in found)
    assert {(plan.computing[0].node_id, plan.decoding.node_id) for plan in found} == {("p", "u"), ("u", "u")}
    assert plans(request, (node("x", work=None),), {}, 0.0) == []


MOST = (1 << 31) - 1  # that the wire takes


@pytest.mark.parametrize("nonsense", [
    NodeReport(1e9, 1e-300, 1e9, 1e9, ((-1e9, MOST),) * 64, MOST, MOST, 1e9, 1e9, 0, TARGETS),
    NodeReport(5e-324, 5e-324, 1e9, 0.0, ((1e9, 0), (0.0, 1)), 1, 0, 5e-324, 1e9, 1, Targets(1e9, 5e-324)),
    NodeReport(),
])  # fmt: skip
def test_a_node_that_reports_nonsense_costs_no_other_a_placement(nonsense: NodeReport) -> None:
    """Whatever it says can be calculated with, counted and told; some node is found."""
    odd = node("odd", work=nonsense)
    for nodes in ((odd,), (odd, node("a")), (node("p", "prefill"), odd)):
        for now in (0.0, 1.0, 1e6):
            request = PlacementRequest(10_000, 100)
            placement = find_elastic(request, nodes, {odd.key: 5_000}, now)
            assert placement is not None
            for told in told_of(placement, request):
                assert all(0 <= word < 1 << 64 for word in told)
                odd.outlook.note_placement(
                    told.num_tokens, now + told.due_ms / 1e3, told.num_streams, now, told.num_stream_tokens
                )
            assert 0 <= spare_share(odd.outlook, now) <= 1
