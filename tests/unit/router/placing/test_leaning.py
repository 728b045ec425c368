"""Nodes that lean: when demand changes what they are for, that it settles, and that it makes nobody late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Targets
from tandem.engine.contracts.wire.work import Leaning, NodeReport
from tandem.engine.scheduling.work.leaning import LEAST_S, OwnLeaning
from tandem.router.placing.elastic import ElasticPlacement, Fleet, Roads, Task
from tandem.router.placing.leaning import (
    HOLDS_S,
    SETTLES_S,
    Candidate,
    Demand,
    LeaningPolicy,
    Side,
    better_side,
    wished,
)
from tandem.router.placing.outlook import Outlook

TARGETS = Targets(2.0, 0.02, 0.0)
TOKEN_S = 1e-4
CHAT, LONG = Demand(0.1, 0.9), Demand(0.95, 0.1)


def outlook(name: str, demand: Demand = Demand(0.0, 0.0), **fields: object) -> Outlook:
    report = NodeReport(
        s_per_token=TOKEN_S, least_s_per_token=TOKEN_S, targets=TARGETS, prompt_share=demand.prefill,
        num_streams=int(demand.decode > 0), step_s=0.95 * TARGETS.tpot_s * demand.decode, **fields,
    )  # type: ignore[arg-type]  # fmt: skip
    return Outlook(NodeKey(name, 1), report)


class World:
    """Nodes that lean as the policy asks; demand spreads over those that are for it."""

    def __init__(self, sides: Iterable[Side]) -> None:
        self.sides = {f"n{index}": side for index, side in enumerate(sides)}
        self.policy, self.now, self.changed_at = LeaningPolicy(), 100.0, -100.0

    def candidates(self, demand: Demand) -> list[Candidate]:
        shares = {}
        for name, side in self.sides.items():
            num = [list(self.sides.values()).count(each) or len(self.sides) for each in ("prefill", "decode")]
            of_prompts = side == "prefill" or "prefill" not in self.sides.values()
            of_streams = side == "decode" or "decode" not in self.sides.values()
            shares[name] = Demand(of_prompts * demand.prefill / num[0], of_streams * demand.decode / num[1])
        for_s = self.now - self.changed_at
        return [Candidate(outlook(name, share), self.sides[name], True, for_s) for name, share in shares.items()]

    def tick(self, demand: Demand) -> bool:
        """Whether a node came to lean the other way half a second later."""
        self.now += 0.5
        change = self.policy.change(self.candidates(demand), self.now)
        if change is not None:
            key, leaning = change
            assert self.sides[key.node_id] != leaning.role
            assert self.now - self.changed_at >= SETTLES_S, "work has to follow the last change first"
            self.sides[key.node_id], self.changed_at = leaning.role, self.now  # type: ignore[assignment]
        return change is not None


@pytest.mark.parametrize(("first", "then", "side"), [(CHAT, LONG, "prefill"), (LONG, CHAT, "decode")])
def test_two_nodes_lean_the_other_way_within_five_seconds_of_a_shift(first: Demand, then: Demand, side: Side) -> None:
    world = World(["prefill", "decode"])
    for _ in range(60):
        world.tick(first)
    assert set(world.sides.values()) == {"prefill", "decode"} - {side}
    shifted_at = world.now
    while not world.tick(then):
        assert world.now - shifted_at < 5.0
    assert world.now - shifted_at <= HOLDS_S + 1.0


def test_a_burst_turns_nobody() -> None:
    world = World(["prefill", "decode"])
    for index in range(200):
        assert not world.tick(LONG if index % 4 == 0 else Demand(0.3, 0.5))


def test_leanings_settle_whatever_the_demand_and_no_split_comes_twice() -> None:
    """Explored: all splits of up to six nodes, under demands up to more than they have."""
    steps = [index / 4 for index in range(9)]
    for num, prompts, streams in itertools.product(range(1, 7), steps, steps):
        for num_prefill in range(num + 1):
            demand, seen, at = Demand(prompts * num / 2, streams * num / 2), [], num_prefill
            while (side := better_side(demand, at, num - at)) is not None:
                seen.append(at)
                at += 1 if side == "prefill" else -1
                assert 0 <= at <= num
                assert at not in seen, f"{num} nodes, {demand}: {seen} and {at} again"


def test_demand_that_wavers_by_a_tenth_makes_no_node_go_to_and_fro() -> None:
    rng = random.Random(11)
    for _ in range(20):
        num = rng.randint(2, 6)
        world = World([rng.choice(("prefill", "decode")) for _ in range(num)])
        base = Demand(rng.uniform(0, num), rng.uniform(0, num))
        changes = 0
        for _ in range(300):
            wavering = Demand(base.prefill * rng.uniform(0.9, 1.1), base.decode * rng.uniform(0.9, 1.1))
            changes += world.tick(wavering)
        assert changes <= num, "each node at most once"


def test_who_is_pinned_or_of_a_fixed_role_stays() -> None:
    policy = LeaningPolicy()
    fixed = [Candidate(outlook("p", Demand(0.0, 0.0)), "prefill", False, 60.0),
             Candidate(outlook("d", Demand(0.0, 2.0)), "decode", True, 60.0)]  # fmt: skip
    assert [policy.change(fixed, now / 2) for now in range(20)] == [None] * 20


# --- what a node makes of it ----------------------------------------------------------------------------------


def test_a_node_follows_demand_and_an_operator_before_it() -> None:
    own = OwnLeaning("prefill", now=0.0)
    own.ask(Leaning("decode", why="streams"), 10.0)
    assert own.told(11.0) == Leaning("decode", False, "streams", 1.0)
    own.ask(Leaning("prefill", why="another router, late"), 10.0 + LEAST_S / 2)
    assert own.told(12.0).role == "decode"
    own.ask(wished("prefill"), 12.0)
    own.ask(Leaning("decode", why="streams"), 20.0)
    assert (own.told(20.0).role, own.told(20.0).is_pinned) == ("prefill", True)
    own.ask(wished("unified"), 30.0)
    assert (own.told(30.0).role, own.told(30.0).is_pinned) == ("prefill", False)
    own.ask(Leaning("decode", why="streams"), 31.0)
    assert own.told(31.0).role == "decode"
    assert own.counters()["leaning_changes"] == 3


def test_a_node_that_never_leaned_does_so_for_an_operator_alone() -> None:
    own = OwnLeaning()
    own.ask(Leaning("decode", why="streams"), 10.0)
    assert own.told(10.0).role == "unified"
    own.ask(wished("decode"), 10.0)
    assert own.told(10.0).role == "decode"
    own.ask(wished("unified"), 11.0)
    assert own.told(11.0).role == "unified"


# --- what it does to placement --------------------------------------------------------------------------------

ROADS = Roads(handover_s=0.01, transfer_s_per_token=1e-6, fetch_s_per_token=1e-5)


def placed(nodes: list[Outlook], leanings: dict[str, str], num_tokens: int = 4_000) -> tuple[str, str, int]:
    """(who computes, who decodes, how many are late)."""
    by_key = {node.key: leanings.get(node.key.node_id, "unified") for node in nodes}
    plan = ElasticPlacement(1).find(
        Task(num_tokens, TARGETS.ttft_s, TARGETS.tpot_s), Fleet(nodes, nodes, ROADS, leanings=by_key), {}, 0.0
    )
    assert plan is not None
    return plan.computing[0].node_id, plan.decoding.node_id, plan.num_late


def test_idle_nodes_that_lean_are_split_and_short_prompts_stay_where_they_decode() -> None:
    leanings = {"p": "prefill", "d": "decode"}
    nodes = [outlook("d"), outlook("p")]
    assert placed(nodes, leanings) == ("p", "d", 0)
    assert placed(nodes, {}) in (("d", "d", 0), ("p", "p", 0))
    assert placed(nodes, leanings, num_tokens=40) == ("d", "d", 0)


def test_a_leaning_makes_nobody_late_whom_another_plan_has_in_time() -> None:
    """Whatever the streams, and when the node for prompts has no time."""
    rng = random.Random(5)
    for _ in range(200):
        nodes = [
            outlook(name, Demand(0.0, rng.choice((0.0, 0.5, 0.99, 1.2))), stream_s_per_token=1e-8) for name in "abc"
        ]
        leanings = {name: rng.choice(("prefill", "decode", "unified")) for name in "abc"}
        num_tokens = rng.randint(10, 30_000)
        assert placed(nodes, leanings, num_tokens)[2] <= placed(nodes, {}, num_tokens)[2]
    full = [outlook("p", prompts=((2.0, 18_000),)), outlook("d")]
    assert placed(full, {"p": "prefill", "d": "decode"}) == ("d", "d", 0)
