"""The policies: nobody herds, hits are used, overload beats affinity, and each tells its reasons."""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import pytest

from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.wire.adapters import HeldAdapters
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Role
from tandem.router.placing.placement import SESSION_PATIENCE_S, Placement, PlacementRequest, find_placement, offers
from tandem.router.placing.policies import PlacementPolicy, Work, costs, make_policy, mean_new_tokens, price
from tandem.router.placing.view import PREFILL_S_PER_TOKEN, TRANSFER_SHARE, NodeView

IDENTITY = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
POLICIES = get_args(PlacementName)
REQUEST = PlacementRequest(num_prompt_tokens=8192, max_tokens=64)
PING = 3
MARK = b"12345678"  # of an adapter


def node(name: str, role: Role = "unified", **status: object) -> NodeView:
    info = NodeInfo(node_id=name, epoch=1, role=role, control_address=f"tcp://{name}", identity=IDENTITY)
    full = {"num_free_blocks": 100_000, "num_blocks": 100_000, "block_size": 64, **status}
    return NodeView(info, Status(node_id=name, epoch=1, sequence=PING, **full))  # type: ignore[arg-type]


def place(
    policy: PlacementPolicy,
    nodes: list[NodeView],
    request: PlacementRequest = REQUEST,
    cached: dict[NodeKey, int] | None = None,
    now: float = 0.0,
) -> Placement:
    """Places one request and notes it, as a router does."""
    placement = find_placement(request, nodes, cached or {}, 256, policy, now)
    assert placement is not None
    for choice in placement.choices:
        choice.node.note_placement(PING, choice.num_computed_tokens, request.num_samples, now, choice.num_new_tokens)
    return placement


@pytest.mark.parametrize("name", POLICIES)
def test_a_thousand_identical_requests_within_one_status_period_spread_out(name: PlacementName) -> None:
    """All of them have a prefix on one node; it computes a quarter of what the others would, so it gets more, and no
    node ends with much more work than another: within 5 % of the mean, with two random choices 30 %."""
    nodes = [node(f"n{index}") for index in range(8)]
    cached = {nodes[3].key: 6144} if name == "prefix_aware" else {}
    policy = make_policy(name, seed=5)
    for _ in range(1000):
        place(policy, nodes, cached=cached)
    work = [view.backlog_s(0.0) for view in nodes]
    mean = sum(work) / len(work)
    assert max(work) - min(work) <= (0.3 if name == "power_of_two" else 0.05) * mean
    counts = [view.num_unseen for view in nodes]
    assert sum(counts) == 1000
    if name == "prefix_aware":
        assert counts[3] > 2 * max(counts[:3])


@pytest.mark.parametrize("num_routers", [1, 4])
def test_routers_that_do_not_see_each_other_misjudge_by_one_request_each(num_routers: int) -> None:
    routers = [([node(f"n{index}") for index in range(8)], make_policy("prefix_aware")) for _ in range(num_routers)]
    counts: Counter[str] = Counter()
    for _ in range(50):
        for nodes, policy in routers:
            counts[place(policy, nodes).primary.node_id] += 1
    assert max(counts.values()) - min(counts.values()) <= num_routers


def test_prefixes_attract_until_the_queue_in_front_costs_more() -> None:
    policy = make_policy("prefix_aware")
    cached = {("b", 1): 6144}
    assert place(policy, [node("a"), node("b")], cached=cached).primary.node_id == "b"
    less, more = (node("b", num_waiting_tokens=waiting) for waiting in (18_000, 18_900))
    assert place(policy, [node("a"), less], cached=cached).primary.node_id == "b"
    assert place(policy, [node("a"), more], cached=cached).primary.node_id == "a"


def test_a_faster_node_is_worth_a_longer_queue() -> None:
    """Rates are the nodes' own: 10,000 tokens at twice the speed are done before 8,192."""
    fast = node("fast", num_waiting_tokens=5000, prefill_s_per_token=PREFILL_S_PER_TOKEN / 2)
    slow = node("slow", prefill_s_per_token=PREFILL_S_PER_TOKEN)
    assert place(make_policy("prefix_aware"), [fast, slow]).primary.node_id == "fast"


def test_equal_costs_go_to_the_cache_that_got_the_least() -> None:
    """Idle nodes all cost the same; always the first of them would leave the memory of the others unused."""
    nodes, policy = [node(name) for name in "abcd"], make_policy("prefix_aware")
    chosen = [place(policy, nodes, now=100.0 * turn).primary.node_id for turn in range(8)]
    assert sorted(chosen[:4]) == sorted(chosen[4:]) == list("abcd")


def test_a_short_common_prefix_does_not_gather_everything_on_one_node() -> None:
    """An idle cluster: each prompt finds its queue empty everywhere and 512 tokens on the first node."""
    nodes, policy = [node(name) for name in "abcd"], make_policy("prefix_aware")
    counts: Counter[str] = Counter()
    for turn in range(100):
        counts[place(policy, nodes, cached={("a", 1): 512}, now=10.0 * turn).primary.node_id] += 1
        for view in nodes:
            view.note_status(Status(node_id=view.info.node_id, epoch=1, sequence=PING + 2), 10.0 * turn + 1)
    assert min(counts.values()) > 15


def test_decode_hits_save_the_transfer() -> None:
    nodes = [node("p", "prefill"), node("d1", "decode"), node("d2", "decode", num_running=20)]
    policy = make_policy("prefix_aware")
    placement = place(policy, nodes, cached={("d2", 1): 7000})
    assert (placement.primary.node_id, placement.reason) == ("d2", "prefill and decode")
    moved = (REQUEST.num_prompt_tokens - 7000) * PREFILL_S_PER_TOKEN * TRANSFER_SHARE
    assert placement.choices[0].transfer_s == pytest.approx(moved)
    assert placement.choices[0].num_computed_tokens == 0
    assert placement.choices[1].num_computed_tokens == REQUEST.num_prompt_tokens


def test_a_measured_slow_link_makes_decode_hits_worth_more() -> None:
    """4,096 tokens over sockets at 3 GB/s cost more than twenty sequences there do."""
    nodes = [node("p", "prefill"), node("d1", "decode"), node("d2", "decode", num_running=20)]
    cached = {("d2", 1): 4096}
    assert place(make_policy("prefix_aware"), nodes, cached=cached).primary.node_id == "d1"
    slow = [node("p", "prefill", transfer_s_per_token=43e-6), *nodes[1:]]
    placement = place(make_policy("prefix_aware"), slow, cached=cached)
    assert placement.primary.node_id == "d2"
    assert placement.choices[0].transfer_s == pytest.approx(4096 * 43e-6)


def test_a_peer_that_can_be_asked_makes_hits_of_others_count() -> None:
    """`b` has the prefix but is busy; `a` fetches it at a tenth of the cost of computing."""
    cached, busy = {("b", 1): 6144}, 40_000
    deaf = place(make_policy("prefix_aware"), [node("a"), node("b", num_waiting_tokens=busy)], cached=cached)
    assert deaf.choices[0].num_computed_tokens == REQUEST.num_prompt_tokens
    fetching = node("a", fetch_s_per_token=PREFILL_S_PER_TOKEN / 10)
    placement = place(make_policy("prefix_aware"), [fetching, node("b", num_waiting_tokens=busy)], cached=cached)
    assert placement.primary.node_id == "a"
    assert placement.choices[0].num_fetched_tokens == 6144
    assert placement.choices[0].num_computed_tokens == REQUEST.num_prompt_tokens - 6144


@pytest.mark.parametrize("name", POLICIES)
def test_draining_and_lost_nodes_get_nothing(name: PlacementName) -> None:
    leaving, gone = node("a", draining=True), node("b")
    gone.lost = True
    nodes, policy = [leaving, gone, node("c"), node("d")], make_policy(name, seed=1)
    cached = {("a", 1): 8192, ("b", 1): 8192}
    assert {place(policy, nodes, cached=cached).primary.node_id for _ in range(40)} == {"c", "d"}
    assert {choice.node.info.node_id for choice in offers(REQUEST, nodes, cached, 0.0)} == {"c", "d"}


def test_round_robin_takes_turns_in_each_half() -> None:
    nodes = [*(node(f"p{i}", "prefill") for i in range(3)), *(node(f"d{i}", "decode") for i in range(2))]
    policy = make_policy("round_robin")
    pairs = [place(policy, nodes) for _ in range(6)]
    assert [pair.primary.node_id for pair in pairs] == ["d0", "d1"] * 3
    assert [pair.prefill.node_id for pair in pairs if pair.prefill] == ["p0", "p1", "p2"] * 2


# --- sessions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_session_stays_where_it_is_in_every_router(name: PlacementName) -> None:
    homes = {}
    for seed in range(3):  # another router, another order of nodes, another epoch of placements
        nodes = [node(f"n{index}") for index in range(8)]
        random.Random(seed).shuffle(nodes)
        policy = make_policy(name, seed=seed)
        for session in ("alice", "bob", "carol", "dave"):
            request = PlacementRequest(200, 8, session=session)
            homes.setdefault(session, set()).update(place(policy, nodes, request).primary.node_id for _ in range(5))
    assert all(len(found) == 1 for found in homes.values())


def test_sessions_spread_and_keep_their_homes_when_a_node_joins() -> None:
    nodes = [node(f"n{index}") for index in range(4)]
    policy = make_policy("prefix_aware")

    def homes(nodes: list[NodeView]) -> list[str]:
        requests = [PlacementRequest(1, 2, session=f"s{number}") for number in range(400)]
        return [place(policy, nodes, request).primary.node_id for request in requests]

    before, after = homes(nodes), homes([*nodes, node("n4")])
    assert min(Counter(before).values()) > 60
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"n4"}
    assert 40 < len(moved) < 130


def test_overload_beats_the_session() -> None:
    nodes = [node(f"n{index}") for index in range(4)]
    request = PlacementRequest(8192, 8, session="alice")
    home = place(make_policy("prefix_aware"), nodes, request).choices[0]
    assert home.why == "session"
    behind = round(2 * SESSION_PATIENCE_S / PREFILL_S_PER_TOKEN)
    home.node.note_placement(PING, behind, 1, 0.0)
    elsewhere = place(make_policy("prefix_aware"), nodes, request)
    assert (elsewhere.choices[0].why, elsewhere.choices[0].node is home.node) == ("prefix_aware", False)
    for other in nodes:
        if other is not home.node:
            other.note_placement(PING, behind, 1, 0.0)
    assert place(make_policy("prefix_aware"), nodes, request).choices[0].node is home.node


# --- figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prompt", "tokens", "all"])
def test_the_fast_costs_are_the_explained_ones(kind: str) -> None:
    rng = random.Random(7)
    for _ in range(200):
        nodes = [
            node(
                f"n{index}",
                num_running=rng.randrange(50),
                num_waiting_tokens=rng.choice([0, rng.randrange(50_000)]),
                num_free_blocks=rng.choice([100, 100_000]),
                prefill_s_per_token=rng.choice([0.0, 1e-5]),
                transfer_s_per_token=rng.choice([0.0, 1e-6]),
                fetch_s_per_token=rng.choice([0.0, 1e-6, 1e-3]),
            )
            for index in range(4)
        ]
        for view in nodes:
            view.num_new_tokens = rng.choice([0.0, 1000.0, 5000.0])
            view.note_adapter(rng.choice([b"", MARK]))
        cached = {view.key: rng.randrange(9000) for view in nodes if rng.random() < 0.5}
        work, now = Work(kind, 8192, adapter=rng.choice([b"", MARK])), rng.choice([0.0, 0.3])
        usual = mean_new_tokens(nodes)
        explained = [price(view, work, cached, now, usual).cost_s for view in nodes]
        assert costs(work, nodes, cached, now, usual) == pytest.approx(explained)


def test_an_adapter_goes_where_it_is_until_that_is_too_busy() -> None:
    """Reading it took the nodes a quarter of a second; the holder has first less, then more than that to do."""
    request = PlacementRequest(1024, 8, adapter=MARK)
    for queued, expected in ((2_000, "b"), (8_000, "a")):
        nodes = [node("a", adapters=HeldAdapters(b"others'8", 0.25))]
        nodes.append(node("b", num_waiting_tokens=queued, adapters=HeldAdapters(b"others'8" + MARK, 0.25)))
        chosen = place(make_policy("prefix_aware"), nodes, request)
        assert chosen.primary.node_id == expected
        assert ("adapter=250.0ms" in chosen.explanation()) == (expected == "a")
        other = place(make_policy("prefix_aware"), nodes, PlacementRequest(1024, 8))
        assert other.primary.node_id == "a", "those without pay for none"
        nodes[0].note_adapter(MARK)
        assert place(make_policy("prefix_aware"), nodes, request).primary.node_id == "a", "it is on its way there"
        nodes[0].note_status(nodes[0].status, 1.0)
        assert nodes[0].adapter_s(MARK) == 0.25, "a status says what is there"


def test_a_queue_is_worked_off_between_reports() -> None:
    view = node("a", num_waiting_tokens=20_000)
    queued_s = 20_000 * PREFILL_S_PER_TOKEN
    assert view.backlog_s(0.25) == pytest.approx(queued_s - 0.25)
    view.note_placement(PING, 10_000, 1, 0.25)
    assert view.backlog_s(0.25) == pytest.approx(queued_s - 0.25 + 10_000 * PREFILL_S_PER_TOKEN)
    assert view.backlog_s(10.0) == 0.0


def test_a_report_corrects_what_it_can_know_better() -> None:
    view = node("a")
    view.note_placement(PING, 20_000, 1, 0.0)  # 1 s of work, by the router's reckoning
    report = Status(node_id="a", epoch=1, sequence=PING + 1, num_waiting_tokens=4000)
    view.note_status(report, 0.5)  # placed before this ping: the 4,000 may or may not contain it
    assert view.backlog_s(0.5) == pytest.approx(0.5)
    view.note_status(Status(node_id="a", epoch=1, sequence=PING + 2, num_waiting_tokens=4000), 0.5)
    assert view.backlog_s(0.5) == pytest.approx(4000 * PREFILL_S_PER_TOKEN)
    view.note_status(Status(node_id="a", epoch=1, sequence=PING + 3, num_waiting_tokens=40_000), 0.5)
    assert view.backlog_s(0.5) == pytest.approx(40_000 * PREFILL_S_PER_TOKEN)


def test_the_explanation_names_nodes_and_reasons_in_one_line_of_ascii() -> None:
    nodes = [node("p", "prefill", num_waiting_tokens=2000), node("d", "decode", num_running=3)]
    text = place(make_policy("prefix_aware"), nodes, cached={("p", 1): 4096}).explanation()
    assert text.isascii()
    assert "\n" not in text
    for part in ("prefill and decode", "tokens=d", "prompt=p", "by=prefix_aware of=1", "cached=4096", "queue=100.0ms"):
        assert part in text
