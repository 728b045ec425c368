"""Placement: which nodes are chosen for what, from a snapshot of their state."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Role
from tandem.router.placing.placement import Placement, PlacementRequest, find_placement
from tandem.router.placing.policies import PrefixAware
from tandem.router.placing.view import PREFILL_S_PER_TOKEN, NodeView

IDENTITY = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
TAIL = 256
LONG = PlacementRequest(num_prompt_tokens=8192, max_tokens=64)


def node(role: Role, name: str, identity: ModelIdentity = IDENTITY, **status: float) -> NodeView:
    status = {"num_free_blocks": 1000, "num_blocks": 1000, "block_size": 64, **status}
    info = NodeInfo(node_id=name, epoch=1, role=role, control_address=f"tcp://{name}", identity=identity)
    return NodeView(info, Status(node_id=name, epoch=1, **status))


def choose(request: PlacementRequest, *nodes: NodeView, cached: dict[NodeKey, int] | None = None) -> Placement | None:
    return find_placement(request, nodes, cached or {}, TAIL, PrefixAware(), now=0.0)


def names(placement: Placement | None) -> tuple[str, str | None]:
    assert placement is not None
    return placement.primary.node_id, placement.prefill.node_id if placement.prefill else None


def test_long_prompts_use_both_halves() -> None:
    assert names(choose(LONG, node("prefill", "p"), node("decode", "d"))) == ("d", "p")


def test_nodes_whose_pool_is_too_small_for_what_it_may_become_are_passed_by() -> None:
    def of_length(role: Role, name: str, length: int) -> NodeView:
        view = node(role, name)
        view.most_tokens = length
        return view

    prefill, small, large = of_length("prefill", "p", 8193), of_length("decode", "d0", 8255), node("decode", "d1")
    warm = {small.key: 8000, large.key: 0}
    assert names(choose(LONG, prefill, small, large, cached=warm)) == ("d1", "p"), "a prompt is all it computes"
    assert names(choose(LONG, prefill, of_length("decode", "d0", 8256), large, cached=warm)) == ("d0", None)
    assert choose(LONG, prefill, small) is None
    assert names(choose(LONG, of_length("prefill", "p", 8192), large)) == ("d1", None)


def test_precise_kv_is_kept_on_one_node_that_has_room_for_it() -> None:
    def in_fp8(name: str, precise_tokens: int) -> NodeView:
        layout = KVLayout((KVGroup(2, 2, 16, dtype="float8_e4m3fn"),), 16)
        info = msgspec.structs.replace(node("decode", name).info, layout=layout, precise_tokens=precise_tokens)
        return NodeView(info, Status(node_id=name, epoch=1, num_free_blocks=1000, num_blocks=1000, block_size=64))

    request = msgspec.structs.replace(LONG, is_precise=True)
    prefill, small, large = node("prefill", "p"), in_fp8("small", 8255), in_fp8("large", 8256)
    assert names(choose(request, prefill, in_fp8("none", 0), small, large)) == ("large", None)
    assert names(choose(request, prefill, small, node("decode", "exact"))) == ("exact", None)
    assert choose(request, prefill, small) is None
    assert names(choose(LONG, prefill, small))[1] == "p", "others are placed as ever"


def test_silent_nodes_get_what_nobody_else_can_take() -> None:
    prefills, decoders = [node("prefill", f"p{i}") for i in range(2)], [node("decode", f"d{i}") for i in range(2)]
    cached = {("d0", 1): 512, ("p0", 1): 512}
    assert names(choose(LONG, *prefills, *decoders, cached=cached)) == ("d0", "p0")
    decoders[0].silent = True
    assert names(choose(LONG, *prefills, *decoders, cached=cached)) == ("d1", "p0")
    prefills[0].silent = True
    assert names(choose(LONG, *prefills, *decoders, cached=cached)) == ("d1", "p1")
    decoders[1].silent = True
    assert names(choose(LONG, *prefills, *decoders, cached=cached)) == ("d0", "p1"), "all are: as if none were"
    decoders[0].lost = True
    assert names(choose(LONG, *prefills, *decoders)) == ("d1", "p1")


@pytest.mark.parametrize(("num_prompt_tokens", "cached", "expected"), [
    (256, 0, ("d", None)),
    (257, 0, ("d", "p")),
    (8192, 8192 - 256, ("d", None)),
    (8192, 8192 - 257, ("d", "p")),
    (8192, 8192, ("d", None)),
])  # fmt: skip
def test_a_short_uncached_tail_stays_on_the_decode_node(
    num_prompt_tokens: int, cached: int, expected: tuple[str, str | None]
) -> None:
    request = PlacementRequest(num_prompt_tokens=num_prompt_tokens, max_tokens=8)
    assert names(choose(request, node("prefill", "p"), node("decode", "d"), cached={("d", 1): cached})) == expected


def test_a_decode_node_that_is_slow_beside_its_decodes_leaves_short_tails_to_prefill_nodes() -> None:
    prefill, request = node("prefill", "p", prefill_s_per_token=1 / 40_000), PlacementRequest(256, 8)
    fast, slow = (node("decode", "d", prefill_s_per_token=rate) for rate in (1 / 7_500, 1 / 1_500))
    assert names(choose(request, prefill, fast)) == ("d", None)
    assert names(choose(request, prefill, slow)) == ("d", "p")
    assert names(choose(PlacementRequest(48, 8), prefill, slow)) == ("d", None), "the hand-over alone takes longer"


@pytest.mark.parametrize(("waiting", "waiting_at_prefill", "expected"), [
    (600, 0, ("d", None)),  # 30 ms and 13 ms for the tail, against 13, 3 for its bytes, 10 for the hand-over, and 20
    (700, 0, ("d", "p")),
    (2300, 1700, ("d", None)),  # 128 ms against 131 ms
    (2450, 1700, ("d", "p")),
    (2600, 10_000, ("d", None)),  # of 500 ms that P has to do it waits for one step
    (2800, 10_000, ("d", "p")),
])  # fmt: skip
def test_a_short_tail_goes_where_it_is_computed_sooner(
    waiting: int, waiting_at_prefill: int, expected: tuple[str, str | None]
) -> None:
    nodes = node("prefill", "p", num_waiting_tokens=waiting_at_prefill), node("decode", "d", num_waiting_tokens=waiting)
    assert names(choose(PlacementRequest(num_prompt_tokens=256, max_tokens=8), *nodes)) == expected


def test_one_token_needs_no_decode_node() -> None:
    nodes = node("prefill", "p"), node("decode", "d")
    assert names(choose(PlacementRequest(8192, 1), *nodes)) == ("p", None)
    assert names(choose(PlacementRequest(8192, 1, num_samples=2), *nodes)) == ("d", "p")
    assert names(choose(PlacementRequest(8192, 1, prompt_logprobs=True), *nodes)) == ("d", None)


def test_prompt_logprobs_are_not_handed_off() -> None:
    request = PlacementRequest(8192, 8, prompt_logprobs=True)
    assert names(choose(request, node("prefill", "p"), node("decode", "d"))) == ("d", None)


def test_a_unified_node_does_everything() -> None:
    assert names(choose(LONG, node("unified", "u"))) == ("u", None)
    assert names(choose(LONG, node("unified", "u"), node("prefill", "p"))) == ("u", None)


def test_without_prefill_nodes_the_decode_node_does_both_and_never_the_other_way() -> None:
    assert names(choose(LONG, node("decode", "d"))) == ("d", None)
    assert choose(LONG, node("prefill", "p")) is None
    assert choose(LONG) is None


def test_draining_and_lost_nodes_are_skipped() -> None:
    draining, lost = node("decode", "d1", draining=True), node("decode", "d2")
    lost.lost = True
    assert choose(LONG, draining, lost, node("prefill", "p")) is None
    assert names(choose(LONG, draining, lost, node("decode", "d3"), node("prefill", "p", draining=True)))[0] == "d3"


def test_only_equal_identities_are_paired() -> None:
    other = ModelIdentity(config="other", weights="w", tokenizer="t", rope="r")
    assert names(choose(LONG, node("prefill", "p", other), node("decode", "d"))) == ("d", None)
    assert names(choose(LONG, node("prefill", "p", other), node("prefill", "q"), node("decode", "d"))) == ("d", "q")


def test_the_longest_cached_prefix_wins_until_load_outweighs_it() -> None:
    nodes = node("prefill", "p1"), node("prefill", "p2"), node("decode", "d")
    assert names(choose(LONG, *nodes, cached={("p2", 1): 4096})) == ("d", "p2")
    busy = node("prefill", "p2", num_waiting_tokens=13_000)
    assert names(choose(LONG, nodes[0], busy, nodes[2], cached={("p2", 1): 4096})) == ("d", "p1")


def test_an_old_epoch_of_a_node_holds_nothing() -> None:
    nodes = node("prefill", "p1"), node("prefill", "p2"), node("decode", "d")
    assert names(choose(LONG, *nodes, cached={("p2", 77): 8192})) == ("d", "p1")


def test_a_decode_node_without_room_is_the_last_choice() -> None:
    full = node("decode", "d1", num_free_blocks=1)
    busy = node("decode", "d2", num_running=60)
    assert names(choose(LONG, full, busy, node("prefill", "p"))) == ("d2", "p")
    assert names(choose(LONG, full, node("prefill", "p"))) == ("d1", "p")


def test_nodes_that_failed_this_request_are_taken_only_when_there_is_no_other() -> None:
    avoid = PlacementRequest(8192, 8, avoid=frozenset({("d1", 1)}))
    prefill = node("prefill", "p")
    assert names(choose(avoid, node("decode", "d1"), node("decode", "d2", num_running=50), prefill)) == ("d2", "p")
    assert names(choose(avoid, node("decode", "d1"), prefill)) == ("d1", "p")


def test_own_placements_count_before_the_status_shows_them() -> None:
    """Sixteen requests between two statuses spread evenly instead of all going to the least loaded node."""
    nodes = [node("decode", f"d{i}") for i in range(4)] + [node("prefill", f"p{i}") for i in range(2)]
    for _ in range(16):
        placement = choose(LONG, *nodes)
        assert placement is not None
        for choice in placement.choices:
            choice.node.note_placement(5, choice.num_computed_tokens, 1, 0.0)
    assert [view.num_unseen for view in nodes] == [4, 4, 4, 4, 8, 8]


def test_placements_are_forgotten_once_the_status_must_show_them() -> None:
    view = node("prefill", "p")
    view.note_placement(5, 100, 1, 0.0)
    view.note_status(Status(node_id="p", epoch=1, sequence=6), 0.0)
    assert (view.backlog_s(0.0), view.num_sequences) == (pytest.approx(100 * PREFILL_S_PER_TOKEN), 1)
    view.note_status(Status(node_id="p", epoch=1, sequence=7, num_waiting_tokens=100, num_waiting=1), 0.0)
    assert (view.backlog_s(0.0), view.num_sequences) == (pytest.approx(100 * PREFILL_S_PER_TOKEN), 1)
