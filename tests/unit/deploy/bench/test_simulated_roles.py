"""Prefill and decode nodes in virtual time: when tokens come, who waits for room, what both caches keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tandem.deploy.bench.simulated.cluster import Simulation
from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.handoffs import Grants
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.shape import ClusterShape, read_counts
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.deploy.bench.trace_report import summarize_jobs
from tandem.engine.contracts.config import PlacementName
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import Targets

FLAT = CostModel(prefill_s_per_token=1e-3, prefill_s_per_token_and_context=0.0, step_s=0.1, sequence_s=0.0,
                 context_s_per_token=0.0, host_s_per_token=0.0, push_s_per_token=1e-6, handover_s=0.01)  # fmt: skip
SPLIT = ClusterShape(0, 100 * TRACE_BLOCK, 0, costs=FLAT, num_prefill=1, num_decode=1)


def request(at: float, blocks: Sequence[int], output: int = 11) -> TraceRequest:
    return TraceRequest(at, TRACE_BLOCK * len(blocks), output, tuple(blocks))


def run(shape: ClusterShape, *requests: TraceRequest, policy: PlacementName = "prefix_aware") -> Simulation:
    simulation = Simulation(shape, policy)
    simulation.run(requests)
    for node in simulation.nodes:
        node.check_integrity()
    return simulation


def test_a_prompt_is_handed_over_while_it_is_computed() -> None:
    """Its bytes take less than its computing: the first decode step begins when the last push is taken over."""
    (job,) = run(SPLIT, request(0.0, range(4))).jobs
    assert job.first_token_at == pytest.approx(2.048 + 0.1)
    assert job.finished_at == pytest.approx(job.first_token_at + 0.01 + 10 * 0.1)


def test_a_slow_link_is_waited_for() -> None:
    slow = dataclasses.replace(SPLIT, costs=dataclasses.replace(FLAT, push_s_per_token=2e-3))
    (job,) = run(slow, request(0.0, range(4))).jobs
    assert job.first_token_at == pytest.approx(2.148)
    assert job.finished_at == pytest.approx(2048 * 2e-3 + 0.01 + 10 * 0.1)


def test_both_nodes_keep_the_prompt_and_its_repetition_is_not_pushed_again() -> None:
    slow = dataclasses.replace(SPLIT, costs=dataclasses.replace(FLAT, push_s_per_token=2e-3))
    simulation = run(slow, request(0.0, range(4)), request(30.0, range(5)))
    _, second = simulation.jobs
    assert second.hits == {"gpu": 4 * TRACE_BLOCK, "cpu": 0, "peer": 0}
    assert second.first_token_at == pytest.approx(30.0 + 0.512 + 0.1)
    assert second.finished_at == pytest.approx(30.0 + 512 * 2e-3 + 0.01 + 10 * 0.1)
    assert [node.cache.match(second.hashes)[0] for node in simulation.nodes] == [5, 5]


def test_prompts_wait_for_room_where_they_decode() -> None:
    """The node that decodes has room for one of the two: the other is computed, and handed over when that ends."""
    small = dataclasses.replace(SPLIT, gpu_tokens=6 * TRACE_BLOCK)
    first, second = run(small, request(0.0, range(4), output=51), request(0.1, range(10, 14))).jobs
    assert second.first_token_at < first.finished_at
    pushed_s = 4 * TRACE_BLOCK * 1e-6
    assert second.finished_at == pytest.approx(first.finished_at + pushed_s + 0.01 + 10 * 0.1)


def test_a_first_token_that_ends_it_goes_nowhere() -> None:
    simulation = run(SPLIT, request(0.0, range(4), output=1))
    (job,) = simulation.jobs
    assert job.finished_at == job.first_token_at
    assert [len(node.done) for node in simulation.nodes] == [1, 0]


def test_room_is_granted_in_the_order_of_claims() -> None:
    grants = Grants(lambda: 5 * TRACE_BLOCK)
    large, small, last = (Job(request(0.0, range(n)), [], 0.0) for n in (4, 2, 1))
    for job in (large, small, last):
        grants.claim(job)
    assert grants.granted() == [large]
    assert grants.granted() == []
    grants.taken(large)
    assert grants.granted() == [small, last]


def test_a_prompt_waits_for_one_that_begins_as_it_does() -> None:
    """The first takes 4.1 s of computing. The second comes 1 s later: its router looks again each 0.1 s, and has heard
    of the first one's blocks by then. The third has one block in common, for which it would wait too long."""
    shape = ClusterShape(2, 100 * TRACE_BLOCK, 0, costs=FLAT, targets=Targets(60.0, 1.0), most_nodes=1)
    requests = [request(0.0, range(8)), request(1.0, range(9)), request(1.5, (0, *range(20, 23)))]
    first, second, third = run(shape, *requests, policy="elastic").jobs
    assert sum(second.hits.values()) == 8 * TRACE_BLOCK
    assert first.first_token_at < second.arrived_at + second.waited_s < first.first_token_at + 0.03 + 2 * 0.1
    assert (first.waited_s, third.waited_s, sum(third.hits.values())) == (0.0, 0.0, 0)
    strangers = run(dataclasses.replace(shape, num_routers=2), *requests[:2], policy="elastic").jobs
    assert [(job.waited_s, sum(job.hits.values())) for job in strangers] == [(0.0, 0)] * 2, "not another router's"


def test_several_nodes_take_a_long_prompts_chunks_in_turn() -> None:
    """Four nodes compute 16,384 tokens at 1 ms each, in three rounds and the first one's last chunk; each chunk ends a
    layer's time after the one before it, and all of it is kept where it decodes."""
    shape = ClusterShape(4, 100 * TRACE_BLOCK, 0, costs=FLAT, targets=Targets(6.0, 0.4))
    simulation = run(shape, request(0.0, range(32)), policy="elastic")
    (job,) = simulation.jobs
    chunk_s = 1.26 + FLAT.step_s
    assert job.num_nodes == 4
    assert 4 * chunk_s < job.first_token_at < 4 * chunk_s + 12 * (1.26 / 32 + 0.01)
    assert job.finished_at == pytest.approx(job.first_token_at + 10 * 0.1), "the first of them decodes"
    assert sorted(node.cache.match(job.hashes)[0] for node in simulation.nodes) == [0, 0, 0, 32]


def test_all_nodes_of_a_prompt_hold_its_blocks_from_the_beginning() -> None:
    """Three helpers push out what they have cached for their share, and have nothing of the prompt afterwards."""
    shape = ClusterShape(4, 40 * TRACE_BLOCK, 0, costs=FLAT, targets=Targets(6.0, 0.4))
    before = [request(0.1 * n, range(1000 * n, 1000 * n + 30), output=1) for n in range(1, 5)]
    simulation = run(shape, *before, request(200.0, range(32)), policy="elastic")
    first, job = simulation.jobs[0], simulation.jobs[-1]
    assert (job.num_nodes, len({each.places for each in simulation.jobs[:4]})) == (4, 4)
    assert [node.cache.num_held for node in simulation.nodes] == [0] * 4
    kept = [sum(node.cache.match(each.hashes)[0] for each in simulation.jobs[:4]) for node in simulation.nodes]
    assert max(kept) < len(first.hashes) - 15, kept


def test_the_elastic_rule_keeps_more_targets_than_any_fixed_division() -> None:
    """Bursts of short prompts with a long one among them, 1.64 s of one node's work, that none can compute in time
    alone."""
    targets = Targets(1.0, 0.1)
    requests = [request(0.0, range(9000 + i, 9001 + i), output=100) for i in range(4)]
    for turn in range(1, 6):
        first = 1000 * turn
        requests.append(request(4.0 * turn, range(first, first + 32), output=5))
        requests += [request(4.0 * turn, range(first + 40 + i, first + 41 + i), output=5) for i in range(6)]
    faster = dataclasses.replace(FLAT, prefill_s_per_token=1e-4, step_s=0.01)
    whole = ClusterShape(4, 400 * TRACE_BLOCK, 0, costs=faster, targets=targets)
    split = dataclasses.replace(whole, num_nodes=0, num_prefill=2, num_decode=2)
    good = {}
    for shape, policy in ((whole, "elastic"), (whole, "prefix_aware"), (whole, "round_robin"), (split, "prefix_aware")):
        simulation = run(shape, *requests, policy=policy)  # type: ignore[arg-type]
        report = summarize_jobs(simulation.jobs, simulation.nodes, targets)
        good[policy, len(shape.roles) - shape.num_nodes] = report.good_share
    best = good.pop(("elastic", 0))
    assert best > max(good.values())


@pytest.mark.parametrize(("text", "counts"), [("4", (4, 0, 0)), ("2+1", (0, 2, 1))])
def test_clusters_are_named_by_their_nodes(text: str, counts: tuple[int, int, int]) -> None:
    assert read_counts(text) == counts


@pytest.mark.parametrize("text", ["0", "2+0", "+1", "1+1+1", "many"])
def test_other_clusters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--simulate"):
        read_counts(text)


def test_nodes_lean_the_other_way_within_five_seconds_of_a_shift() -> None:
    """Chat alone, from the 20th second on long prompts alone."""
    shape = ClusterShape(
        0, 850_000, 0, num_prefill=1, num_decode=3, targets=Targets(ttft_s=2.0, tpot_s=0.025), leans=True
    )
    chat = [TraceRequest(at / 40, 256, 256, (at,)) for at in range(800)]
    long = [TraceRequest(20 + at / 12, 8192, 32, tuple(range(16 * at + 1000, 16 * at + 1016))) for at in range(180)]
    simulation = Simulation(shape, "elastic")
    simulation.run([*chat, *long])
    (first, key, side), *_ = [each for each in simulation.leanings.changes if each[0] > 20]
    assert (side, first <= 25) == ("prefill", True)
    assert simulation.leanings.sides[key] == "prefill"
    assert all(job.finished_at for job in simulation.jobs)


def test_at_a_tight_time_a_token_two_nodes_divide_and_keep_as_many_targets_as_fixed_roles() -> None:
    """Chat and long prompts at 7 ms a token, of which reading the weights takes 4.5."""
    targets = Targets(0.3, 0.007)
    requests = [TraceRequest(at / 12, 256, 256, (at,)) for at in range(120)]
    requests += [
        TraceRequest(at / 3 + 0.01, 8192, 32, tuple(range(16 * at + 1000, 16 * at + 1016))) for at in range(30)
    ]
    requests.sort(key=lambda each: each.arrival_s)
    good = {}
    for name, shape, policy in (
        ("two", ClusterShape(2, 850_000, 0, targets=targets), "elastic"),
        ("leaning", ClusterShape(0, 850_000, 0, num_prefill=1, num_decode=1, targets=targets, leans=True), "elastic"),
        ("fixed", ClusterShape(0, 850_000, 0, num_prefill=1, num_decode=1, targets=targets), "prefix_aware"),
    ):
        simulation = run(shape, *requests, policy=policy)  # type: ignore[arg-type]
        good[name] = summarize_jobs(simulation.jobs, simulation.nodes, targets).good_share
    assert good["two"] >= good["fixed"] > 0.9
    assert good["leaning"] >= good["fixed"]


@pytest.mark.parametrize("policy", ["elastic", "prefix_aware"])
def test_a_prefix_has_as_many_copies_as_its_demand_needs_nodes(policy: PlacementName) -> None:
    """A prefix of 8,192 tokens with 2,048 of each request's own: one node serves two a second, thirty it doesn't. The
    others pull it once."""
    shape = ClusterShape(4, 850_000, 0, targets=Targets(2.0, 0.025), costs=CostModel(fetch_s_per_token=1 / 600_000))
    num_copies, good = {}, {}
    for rate in (2, 30):
        own = [range(1000 + 4 * index, 1004 + 4 * index) for index in range(10 * rate)]
        requests = [
            TraceRequest(at / rate, 20 * TRACE_BLOCK, 20, (*range(16), *blocks)) for at, blocks in enumerate(own, rate)
        ]
        simulation = run(shape, request(0.0, range(16)), *requests, policy=policy)
        first, *others = simulation.jobs
        held = [node.cache.match(first.hashes)[0] for node in simulation.nodes]
        num_copies[rate] = held.count(16)
        report = summarize_jobs(simulation.jobs, simulation.nodes, shape.targets)
        good[rate] = report.good_share
        assert all(sum(job.hits.values()) == 16 * TRACE_BLOCK for job in others), "it is computed once"
    assert num_copies[2] == 1
    assert num_copies[30] >= 2
    assert min(good.values()) == 1.0
