"""Which nodes give sequences away, to whom, and when they stop."""

from __future__ import annotations

import random
from typing import Any

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Targets
from tandem.engine.contracts.wire.work import Leaning, NodeReport
from tandem.router.placing.rebalancing import (
    MOST_FROM_DRAINING,
    MOST_FROM_FULL,
    REBALANCE_EVERY_S,
    MigrationPolicy,
    is_late,
)
from tandem.router.placing.view import NodeView

BLOCKS, SIZE = 100, 16


def node(name: str, used: int = 0, role: str = "decode", draining: bool = False) -> NodeView:
    info = NodeInfo(node_id=name, epoch=1, role=role)  # type: ignore[arg-type]
    status = Status(
        node_id=name, epoch=1, num_free_blocks=BLOCKS - used, num_blocks=BLOCKS, block_size=SIZE, draining=draining
    )
    return NodeView(info, status)


def names(policy: MigrationPolicy, nodes: list[NodeView], now: float = 100.0) -> list[tuple[str, int]]:
    return [(view.info.node_id, most) for view, most in policy.sources(nodes, now)]


def test_a_draining_decode_node_gives_everything_away_if_there_is_another() -> None:
    draining = node("a", 50, draining=True)
    assert names(MigrationPolicy(), [draining, node("p", role="prefill")]) == []
    assert names(MigrationPolicy(), [draining, node("b"), node("p", role="prefill", draining=True)]) == [
        ("a", MOST_FROM_DRAINING)
    ]


def test_a_draining_unified_node_gives_to_unified_nodes_before_decode_nodes() -> None:
    policy, source = MigrationPolicy(), node("a", 50, role="unified", draining=True)
    others = [node("u", 40, role="unified"), node("d", 10), node("p", role="prefill")]
    assert names(policy, [source, *others]) == [("a", MOST_FROM_DRAINING)]
    assert names(policy, [source, others[2]]) == []
    chosen = [policy.target(source, [source, *some], 64) for some in (others, others[1:], others[2:])]
    assert [view and view.info.node_id for view in chosen] == ["u", "d", None]
    full = [node("u", 99, role="unified"), node("d", 10)]
    assert policy.target(source, full, 64) is full[1]
    full[1].most_tokens = 512
    assert policy.target(source, full, 64, 512) is full[1]
    assert policy.target(source, full, 64, 513) is not full[1], "it could not end there as it was asked to"


def test_nothing_goes_to_a_node_that_may_be_lost_soon() -> None:
    source, silent, other = node("a", 50, draining=True), node("b"), node("c", 60)
    silent.silent = True
    assert MigrationPolicy().target(source, [source, silent, other], 64) is other
    assert MigrationPolicy().target(source, [source, silent], 64) is None


def test_without_the_option_a_full_node_keeps_what_it_has() -> None:
    assert names(MigrationPolicy(), [node("a", 99), node("b")]) == []


def test_rebalancing_starts_at_the_difference_and_stops_at_half_of_it() -> None:
    policy = MigrationPolicy(0.4)
    assert names(policy, [node("a", 45), node("b", 10)]) == []
    assert names(policy, [node("a", 55), node("b", 10)]) == [("a", MOST_FROM_FULL)]
    assert names(policy, [node("a", 45), node("b", 20)]) == [("a", MOST_FROM_FULL)], "it goes on below the start"
    assert names(policy, [node("a", 40), node("b", 25)]) == []
    assert names(policy, [node("a", 45), node("b", 20)]) == [], "and does not begin again there"


def test_a_nearly_full_node_is_relieved_earlier() -> None:
    assert names(MigrationPolicy(0.4), [node("a", 97), node("b", 70)]) == [("a", MOST_FROM_FULL)]
    assert names(MigrationPolicy(0.4), [node("a", 97), node("b", 90)]) == []


def test_one_decision_a_second() -> None:
    policy, source = MigrationPolicy(0.4), node("a", 80)
    nodes = [source, node("b")]
    assert names(policy, nodes, 10.0)
    policy.moved(source, 10.0)
    assert names(policy, nodes, 10.0 + REBALANCE_EVERY_S / 2) == []
    assert names(policy, nodes, 10.0 + REBALANCE_EVERY_S)


def test_the_target_has_room_and_is_the_least_full() -> None:
    policy, source = MigrationPolicy(), node("a", 50, draining=True)
    nodes = [source, node("b", 40), node("c", 30), node("d", 20, draining=True), node("p", role="prefill")]
    target = policy.target(source, nodes, 10 * SIZE)
    assert target is not None
    assert target.info.node_id == "c"
    assert policy.target(source, nodes, 60 * SIZE) is None


def test_rebalancing_does_not_turn_the_difference_round() -> None:
    policy, source = MigrationPolicy(0.2), node("a", 60)
    nodes = [source, node("b", 30)]
    assert policy.target(source, nodes, 14 * SIZE) is not None
    assert policy.target(source, nodes, 16 * SIZE) is None


# --- streams that are late ------------------------------------------------------------------------------------

TARGETS, OF_TOKEN = Targets(2.0, 0.02, 0.0), 1e-6
LENGTH = 1_000  # of each stream: a millisecond of a step


def of_streams(name: str, streams: int, leaning: str = "unified", now: float = 0.0, **work: Any) -> NodeView:
    report = NodeReport(
        1e-4, 1e-4, num_streams=streams, step_s=0.004 + streams * LENGTH * OF_TOKEN, stream_s_per_token=OF_TOKEN,
        targets=TARGETS, **work,
    )  # fmt: skip
    info = NodeInfo(node_id=name, epoch=1, role="unified")
    room = {"num_free_blocks": 900, "num_blocks": 1000, "block_size": SIZE}
    return NodeView(info, Status(node_id=name, epoch=1, work=report, leaning=Leaning(leaning), **room), now)


def test_a_late_stream_moves_where_it_is_in_time_one_a_second() -> None:
    policy, late, free = MigrationPolicy(moves_late=True), of_streams("a", 16), of_streams("b", 3)
    assert names(policy, [late, free]) == [("a", MOST_FROM_FULL)]
    assert policy.target(late, [late, free], LENGTH, now=100.0) is free
    policy.moved(late, 100.0)
    assert names(policy, [late, free], 100.0 + REBALANCE_EVERY_S / 2) == []
    assert names(policy, [late, free], 100.0 + REBALANCE_EVERY_S) == [("a", MOST_FROM_FULL)]
    assert policy.target(late, [late, of_streams("b", 12)], LENGTH, now=100.0) is None, "it would soon be late there"
    assert policy.target(late, [late, of_streams("b", 3, "prefill")], LENGTH, now=100.0) is None
    assert names(MigrationPolicy(), [late, free]) == [], "unless routers place by lateness"


def test_streams_make_room_for_prompts_that_are_late_on_a_node_for_prompts() -> None:
    late = ((-1.0, 5_000),)
    policy, source, other = (
        MigrationPolicy(moves_late=True),
        of_streams("a", 3, "prefill", prompts=late),
        of_streams("b", 1),
    )
    assert names(policy, [source, other], 0.0) == [("a", MOST_FROM_FULL)]
    assert policy.target(source, [source, other], LENGTH, now=0.0) is other
    assert names(policy, [of_streams("a", 3, "decode", prompts=late), other], 0.0) == []


def test_no_stream_goes_to_and_fro() -> None:
    """Whatever nodes have: moves come to an end, and no stream moves twice."""
    rng = random.Random(3)
    for _ in range(300):
        leanings = [rng.choice(("prefill", "decode", "unified")) for _ in range(rng.randint(2, 5))]
        streams = [[f"{index}/{i}" for i in range(rng.randint(0, 20))] for index in range(len(leanings))]
        late = [((-1.0, 5_000),) if rng.random() < 0.3 else () for _ in leanings]
        policy, now, moved = MigrationPolicy(moves_late=True), 0.0, []
        for _ in range(sum(map(len, streams)) + 1):
            now += REBALANCE_EVERY_S
            nodes = [
                of_streams(str(i), len(streams[i]), leanings[i], now, prompts=late[i]) for i in range(len(leanings))
            ]
            for source, _ in policy.sources(nodes, now):
                target = policy.target(source, nodes, LENGTH, now=now)
                if target is not None:
                    policy.moved(source, now)
                    stream = streams[int(source.info.node_id)].pop(0)
                    moved.append(stream)
                    streams[int(target.info.node_id)].append(stream)
                    target.outlook.num_placed += 1
        assert len(moved) == len(set(moved))
        for node in nodes:
            assert not is_late(node, now) or policy.target(node, nodes, LENGTH, now=now) is None, "some still could"
