"""Who computes and who decodes, by the lateness that it causes: hand-made clusters, one question each."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping

import msgspec
import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import Due, fewest_late
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.elastic import ElasticPlacement, Fleet, Plan, Roads, Task
from tandem.router.placing.outlook import Outlook

TOKEN_S = 1e-4
ROADS = Roads(handover_s=0.01, transfer_s_per_token=1e-6, fetch_s_per_token=1e-5)
TASK = Task(num_prompt_tokens=10_000, ttft_s=2.0, tpot_s=0.025)
A, B, C, D = (NodeKey(name, 1) for name in "abcd")


def node(key: NodeKey, **fields: object) -> Outlook:
    fields = {"free_tokens": 1_000_000, **fields}
    report = NodeReport(s_per_token=TOKEN_S, least_s_per_token=TOKEN_S, step_s=0.005, **fields)  # type: ignore[arg-type]
    return Outlook(key, report)


def find(
    *nodes: Outlook, task: Task = TASK, cached: Mapping[NodeKey, int] | None = None, most: int = 1, roads: Roads = ROADS
) -> Plan:
    placement, backwards = ElasticPlacement(most_nodes=most), nodes[::-1]
    kinds = {each.key: "" for each in nodes}
    plan = placement.find(task, Fleet(nodes, nodes, roads, kinds=kinds), cached or {}, 0.0)
    assert plan is not None
    again = placement.find(task, Fleet(backwards, backwards, roads, kinds=kinds), cached or {}, 0.0)
    assert plan == again, "whatever their order"
    return plan


# --- who is late ----------------------------------------------------------------------------------------------


def test_no_order_makes_fewer_late() -> None:
    rng = random.Random(7)
    for _ in range(200):
        prompts = [Due(i, rng.uniform(0, 6), rng.randint(1, 4), order=i) for i in range(rng.randint(1, 6))]
        on_time, late = fewest_late(prompts, 1.0, 0.0)
        assert sorted(due.prompt for due in (*on_time, *late)) == list(range(len(prompts)))
        ends = itertools.accumulate(due.num_tokens for due in on_time)
        assert all(end <= due.due_at for end, due in zip(ends, on_time, strict=True))
        fewest = min(_num_late(order) for order in itertools.permutations(prompts))
        assert len(late) == fewest


def _num_late(order: tuple[Due[int], ...]) -> int:
    ends = itertools.accumulate(due.num_tokens for due in order)
    return sum(end > due.due_at for end, due in zip(ends, order, strict=True))


# --- what is expected of a node -------------------------------------------------------------------------------


def test_what_a_node_computes_is_worked_off() -> None:
    outlook = node(A, prompts=((1.0, 4_000), (5.0, 20_000)))
    assert outlook.backlog_s(0.0) == pytest.approx(2.4)
    assert outlook.backlog_s(1.4) == pytest.approx(1.0)
    assert outlook.backlog_s(9.0) == 0.0


def test_a_report_shows_what_was_placed_before_its_ping_and_nothing_later() -> None:
    outlook = node(A)
    outlook.note_placement(10_000, 2.0, 1, 0.0)
    outlook.note_placement(5_000, 2.0, 1, 0.1)
    outlook.note_report(NodeReport(s_per_token=TOKEN_S, prompts=((1.0, 9_000),), num_streams=1), 0.05, 0.1)
    assert outlook.backlog_s(0.1) == pytest.approx(1.4)
    assert outlook.num_streams == 2
    outlook.note_report(NodeReport(s_per_token=TOKEN_S, num_streams=2), 0.45, 0.5)
    assert (outlook.backlog_s(0.5), outlook.num_streams) == (0.0, 2)


def test_a_forecast_that_was_kept_is_the_one_that_would_be_made() -> None:
    """At any time, after anything: an outlook of the same prompts that has kept nothing says the same."""
    rng = random.Random(3)
    kept, now = node(A, prompts=((0.3, 2_000), (0.4, 5_000), (2.0, 3_000))), 0.0
    for _ in range(300):
        now += rng.choice((0.0, 0.0213))
        if rng.random() < 0.2:
            kept.note_placement(rng.randint(1, 4_000), now + rng.uniform(0, 2), 0, now)
        forecast = kept.without(now)
        fresh = copy.deepcopy(kept)
        fresh._changed()
        assert fresh.without(now) == pytest.approx(forecast)
        if fresh._prompts:
            beside = kept.forecast(now, TOKEN_S, now + 1e9)
            assert beside.num_late == forecast.num_late
            assert beside.others_s == pytest.approx(forecast.others_s, abs=len(fresh._prompts) * TOKEN_S)


def test_late_prompts_wait_on_purpose_and_count_as_no_work_in_front() -> None:
    """A huge prompt that is late anyway lets a small one pass, as on the node."""
    outlook = node(A, prompts=((0.5, 100_000),))
    assert outlook.without(0.0).num_late == 1
    assert outlook.late_s(0.0) == pytest.approx(10.0)
    forecast = outlook.forecast(0.0, 0.2, 1.0)
    assert forecast.own_s == pytest.approx(0.2)
    assert forecast.num_late == 1


# --- which node -----------------------------------------------------------------------------------------------


def test_the_node_where_nobody_would_be_late_by_it() -> None:
    """On a it would have its first token sooner, but another would be late for it."""
    busy = node(A, prompts=((0.75, 7_000), (1.9, 11_000)))
    calm = node(B, prompts=((1.0, 9_500),))
    plan = find(busy, calm)
    assert (plan.computing, plan.decoding, plan.num_late) == ((B,), B, 0)
    assert plan.own_s == pytest.approx(1.95)


def test_a_late_prompt_in_the_queue_does_not_scare_away() -> None:
    """By work in front of it b would be better: a's is late anyway and lets it pass, and b has two that wait for it."""
    plan = find(node(A, prompts=((0.5, 90_000),)), node(B, prompts=((3.0, 4_000), (3.5, 4_000))))
    assert plan.computing == (A,)


def test_it_goes_where_it_is_cached_unless_someone_would_be_late() -> None:
    cached = {B: 9_000}
    assert find(node(A), node(B), cached=cached).computing == (B,)
    full = node(B, prompts=((0.9, 8_990), (2.0, 11_000)))
    plan = find(node(A), full, cached=cached)
    assert plan.computing == (A,)
    assert plan.peer == B, "and pulls what is cached"


def test_nothing_is_pulled_where_nodes_do_not_pull() -> None:
    full = node(B, prompts=((0.9, 8_990), (2.0, 11_000)))
    plan = find(node(A), full, cached={B: 9_000}, roads=Roads(0.01, 1e-6))
    assert (plan.computing, plan.peer) == ((A,), None)
    assert plan.own_s == pytest.approx(1.0)


# --- who decodes ----------------------------------------------------------------------------------------------


def test_tokens_are_made_where_the_prompt_was_computed() -> None:
    assert find(node(A, num_streams=3), node(B, num_streams=5)).decoding == A


def test_a_node_whose_streams_would_be_late_hands_over() -> None:
    """a has the prompt cached and 40 streams that one more would make late: it computes, b decodes."""
    busy = Outlook(
        A,
        NodeReport(s_per_token=TOKEN_S, least_s_per_token=TOKEN_S, num_streams=40, step_s=0.0235,
                   stream_s_per_token=5e-8),
    )  # fmt: skip
    plan = find(busy, node(B), cached={A: 9_999})
    assert (plan.computing, plan.decoding, plan.num_late) == ((A,), B, 0)


def test_streams_that_no_report_shows_yet_count_with_their_own_context() -> None:
    """Six chats were placed on a: another prompt's 10,000 tokens are not theirs. Six such prompts would be."""
    for num_tokens, decoding in ((100, A), (10_000, B)):
        busy = node(A, num_streams=1, stream_s_per_token=4e-7)
        for _ in range(6):
            busy.note_placement(0, 0.0, 1, 0.0, num_tokens)
        assert find(busy, node(B), cached={A: 9_999}).decoding == decoding


def test_roles_bound_who_does_what() -> None:
    prefill, decode = node(A, prompts=((9.0, 15_000),)), node(B)
    plan = ElasticPlacement().find(TASK, Fleet([prefill], [decode], ROADS), {}, 0.0)
    assert plan is not None
    assert (plan.computing, plan.decoding) == ((A,), B)
    assert ElasticPlacement().find(TASK, Fleet([], [decode], ROADS), {}, 0.0) is None
    assert ElasticPlacement().find(TASK, Fleet([prefill], [], ROADS), {}, 0.0) is None


def test_a_request_that_can_not_move_stays_where_it_is_computed() -> None:
    stays = Task(10_000, ttft_s=2.0, tpot_s=0.025, moves=False)
    prefill, slow = node(A), node(B, prompts=((9.0, 15_000),))
    plan = ElasticPlacement().find(stays, Fleet([prefill, slow], [slow], ROADS), {}, 0.0)
    assert plan is not None
    assert (plan.computing, plan.decoding) == ((B,), B)


def test_a_node_without_room_decodes_only_if_none_has_any() -> None:
    assert find(node(A, free_tokens=5_000), node(B, num_streams=20)).decoding == B
    assert find(node(A, free_tokens=5_000)).decoding == A


# --- several nodes for one prompt -----------------------------------------------------------------------------


def test_a_prompt_too_long_for_one_node_is_spread() -> None:
    task = Task(60_000, ttft_s=2.0, tpot_s=0.025)
    plan = find(node(A), node(B), node(C), node(D), task=task, most=4)
    assert (plan.computing, plan.decoding, plan.num_late) == ((A, B, C, D), A, 0)
    assert plan.own_s == pytest.approx(plan.share_s) == pytest.approx(1.5)


@pytest.mark.parametrize("others", [{"free_tokens": 59_000}, {"kind": "of another host"}, {"num_streams": 1}])
def test_who_lacks_room_or_reaches_it_not_does_not_help_nor_who_has_streams_where_nobody_is_late(others: dict) -> None:
    task, kind = Task(60_000, ttft_s=2.0, tpot_s=0.025), others.pop("kind", "")
    task = msgspec.structs.replace(task, ttft_s=9.0) if "num_streams" in others else task
    nodes = [node(A), node(B, **others)]
    fleet = Fleet(nodes, nodes, ROADS, kinds={A: "", B: kind})
    plan = ElasticPlacement(2).find(task, fleet, {}, 0.0)
    assert plan is not None
    assert plan.computing == (A,)


def test_a_session_stays_at_its_home_while_nothing_is_known_and_nobody_is_late_for_it() -> None:
    homely = msgspec.structs.replace(TASK, homes=frozenset({B}))
    busy = [node(A), node(B, prompts=((1.0, 5_000),))]
    assert find(*busy).computing == (A,)
    assert find(*busy, task=homely).computing == (B,)
    assert find(node(A), node(B, prompts=((1.5, 12_000),)), task=homely).computing == (A,), "it would be late at home"


def test_a_short_prompt_is_not_spread() -> None:
    task = Task(6_000, ttft_s=2.0, tpot_s=0.025)
    assert len(find(node(A), node(B), task=task, most=4).computing) == 1


def test_nobody_is_made_late_to_spread_a_prompt() -> None:
    """b's prompts just make it: the long one takes a and c."""
    task = Task(36_000, ttft_s=2.0, tpot_s=0.025)
    plan = find(node(A), node(B, prompts=((1.0, 9_900), (2.0, 9_900))), node(C), task=task, most=2)
    assert plan.computing == (A, C)


def test_attention_over_a_long_prompt_counts() -> None:
    """A token behind 30,000 others takes twice as long as the first one."""
    task = Task(30_000, ttft_s=9.0, tpot_s=0.025)
    assert find(node(A, attention_growth=1 / 30_000), task=task).own_s == pytest.approx(4.5)
