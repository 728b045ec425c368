"""Which nodes give sequences away, to whom, and when they stop."""

from __future__ import annotations

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.router.placing.rebalancing import MOST_FROM_DRAINING, MOST_FROM_FULL, REBALANCE_EVERY_S, MigrationPolicy
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
