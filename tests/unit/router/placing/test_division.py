"""Who takes streams where a model's weights take much of the time a token: few nodes, the same ones, more when full."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.division import takers_of_streams
from tandem.router.placing.elastic import ElasticPlacement, Fleet, Plan, Roads, Task
from tandem.router.placing.outlook import Outlook

WEIGHTS_S, STREAM_S, TPOT_S = 0.0045, 0.00005, 0.007
MOST_STREAMS = int((AIMED_AT * TPOT_S - WEIGHTS_S) / STREAM_S)  # that a node keeps in time
TOKEN_S = 2.5e-5


def node(name: str, num_streams: int, **fields: object) -> Outlook:
    step_s = WEIGHTS_S + num_streams * STREAM_S
    token_s = 1.2e-4 if num_streams else TOKEN_S
    usual = {"s_per_token": token_s, "least_s_per_token": TOKEN_S, "least_step_s": WEIGHTS_S}
    report = NodeReport(num_streams=num_streams, step_s=step_s, **{**usual, **fields})  # type: ignore[arg-type]
    return Outlook(NodeKey(name, 1), report)


def takers(streams: Sequence[int], tpot_s: float = TPOT_S, others_compute: bool = False) -> str:
    nodes = [node("abcdefgh"[index], num) for index, num in enumerate(streams)]
    found = takers_of_streams(nodes, tpot_s, others_compute)
    assert found == takers_of_streams(nodes[::-1], tpot_s, others_compute), "whatever their order"
    return "all do all" if found is None else "".join(sorted(key.node_id for key in found))


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ((0, 0), "a"),
        ((0, 1), "b"),  # not the first on a
        ((8, 9), "b"),  # those of a end, and no others come
        ((MOST_STREAMS // 2, 0, 0), "a"),
        ((MOST_STREAMS, 0, 0), "ab"),
        ((MOST_STREAMS * 2 // 3, MOST_STREAMS * 2 // 3, 0), "ab"),  # more than one keeps, with some to spare
        ((MOST_STREAMS, MOST_STREAMS), "a"),  # as long as they fit, one is left to prompts
        ((2 * MOST_STREAMS, 2 * MOST_STREAMS), "ab"),
    ],
)
def test_streams_have_as_few_nodes_as_keep_them_in_time(streams: Sequence[int], expected: str) -> None:
    assert takers(streams) == expected


def test_nodes_divide_only_where_weights_take_much_of_the_time() -> None:
    assert takers((0, 5), tpot_s=0.025) == takers((0, 5), tpot_s=0.0) == "all do all"
    assert takers((0, 5), tpot_s=0.004) == "all do all", "nobody can be in time"
    unmeasured = [node("a", 3, least_step_s=0.0)]
    assert takers_of_streams(unmeasured, TPOT_S) is None


def test_where_others_compute_all_may_take_streams() -> None:
    assert takers((MOST_STREAMS, MOST_STREAMS), others_compute=True) == "ab"


def test_the_division_settles() -> None:
    """Under one demand, whatever nodes had at first, takers change no more once the streams of others have ended."""
    rng = random.Random(5)
    for _ in range(200):
        streams = [rng.randint(0, MOST_STREAMS) for _ in range(rng.randint(2, 6))]
        seen = []
        for _ in range(20):
            seen.append(takers(streams))
            total = sum(streams)
            mine = [name in seen[-1] for name in "abcdef"[: len(streams)]]
            ending = [num // 2 if not is_mine else num for num, is_mine in zip(streams, mine, strict=True)]
            streams = _shared(ending, mine, total)
        assert len(set(seen[-10:])) == 1, seen


def _shared(streams: Sequence[int], mine: Sequence[bool], total: int) -> list[int]:
    """What has ended comes again, one by one to the taker that has fewest."""
    streams = list(streams)
    while sum(streams) < total:
        least = min((num, index) for index, num in enumerate(streams) if mine[index])
        streams[least[1]] += 1
    return streams


# --- as placement takes it ------------------------------------------------------------------------------------

CHAT, LONG = Task(256, 0.3, TPOT_S), Task(8192, 0.3, TPOT_S)
ROADS = Roads(handover_s=0.003, transfer_s_per_token=4e-7)


def find(task: Task, nodes: Sequence[Outlook], **fleet: object) -> Plan:
    plan = ElasticPlacement().find(task, Fleet(nodes, nodes, ROADS, **fleet), {}, 0.0)  # type: ignore[arg-type]
    assert plan is not None
    return plan


def names(plan: Plan) -> tuple[str, str]:
    return ",".join(key.node_id for key in plan.computing), plan.decoding.node_id


def test_a_long_prompt_that_is_late_stays_with_those_that_compute() -> None:
    """The node with streams would be done with it sooner, and late as well; from then on neither could compute."""
    nodes = [node("a", 20), node("b", 0, prompts=((0.25, 8_000), (0.29, 60_000)))]
    assert names(find(LONG, nodes)) == ("b", "a")


def test_who_has_no_streams_yet_computes_whatever_comes() -> None:
    nodes = [node("a", 0), node("b", 0, prompts=((0.25, 8_000),))]
    assert names(find(LONG, nodes)) == ("a", "a")


def test_short_prompts_are_computed_beside_streams() -> None:
    assert names(find(CHAT, [node("a", 20), node("b", 0, prompts=((0.25, 8_000),))])) == ("a", "a")


def test_the_first_stream_stays_off_the_node_that_computes() -> None:
    """Though all that the request needs is cached there and idle."""
    nodes = [node("a", 20), node("b", 0)]
    plan = ElasticPlacement().find(LONG, Fleet(nodes, nodes, ROADS), {nodes[1].key: 8_191}, 0.0)
    assert plan is not None
    assert names(plan) == ("b", "a")


def test_leanings_say_who_takes_streams_first() -> None:
    for side_a, side_b in itertools.permutations(("prefill", "decode")):
        nodes = [node("a", 0), node("b", 0)]
        leanings = {nodes[0].key: side_a, nodes[1].key: side_b}
        assert names(find(LONG, nodes, leanings=leanings))[1] == ("a" if side_a == "decode" else "b")


def test_what_no_node_may_hand_over_stays_where_it_is_computed() -> None:
    nodes = [node("a", 20), node("b", 0)]
    keys = frozenset(each.key for each in nodes)
    assert names(find(LONG, nodes, stays=keys, takes_none=keys)) == ("b", "b")
