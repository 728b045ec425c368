"""Pulls under the forward pass of a request that runs alone: what is let through, and what a void step leaves."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from engine_harness import BLOCK, Harness
from pull_world import PullWorld, chain

from tandem.engine.interfaces import NoTiers
from tandem.engine.messages import KVLayers
from tandem.engine.request import Request
from tandem.kernels.digest import BlockSums, block_digests
from tandem.kernels.push_blocks import list_rows
from tandem.kv_connector.layer_gates import Arrivals
from tandem.kv_connector.meta import Finalize, ReadySent, VerifyLayers, WholePush, digest_key
from tandem.kv_connector.pull_rates import UNDER_STEP_S
from tandem.kv_connector.tiers.jobs import StepLoads
from tests.fakes.kv_pools import PoolNode, wait_until
from tests.fakes.transfer_side import Side

KEY = ("r", 0)
PROMPT = [*range(13), 0, 1, 2, 3, 4, 5, 6, 7]  # 21 tokens: five blocks and one token


# --- layers on their way ---------------------------------------------------------------------------------------


@pytest.fixture
def sides():
    source, sink = Side(PoolNode("p", "local", seed=1)), Side(PoolNode("d", "local", seed=2))
    sink.node.admit(source.node.info)
    source.transfer.connect_peer(sink.node.info)
    yield source, sink
    for side in (source, sink):
        assert side.transfer.stop(5.0)
        side.node.close()


def pushed(source: Side, sink: Side):
    """(grant, what the sink is told) of blocks 1 and 5 into 4 and 9, three layers."""
    grant = sink.node.grant(source.node.info, [4, 9])
    sink.transfer.gates.expect(grant)
    source.transfer.submit(WholePush(KEY, grant, (1, 5), (4, 9), (8, 8), -1, by_layer=True))
    assert wait_until(lambda: len(source.sent) == 3)
    return grant, [message for _, message in source.sent]


def has_failed(load) -> bool:
    """Once the transfer thread has come so far."""
    return wait_until(lambda: load.has_failed, timeout_s=1.0)


def test_each_layer_is_let_through_when_it_is_right(sides) -> None:
    source, sink = sides
    grant, told = pushed(source, sink)
    assert [message.num_layers for message in told] == [1, 2, 3]
    gates = sink.transfer.gates.load_of(grant.grant_id).start(sink.node.pool)
    load = sink.transfer.gates.load_of(grant.grant_id)
    for layer, message in enumerate(told):
        sink.transfer.submit(VerifyLayers(message))
        gates[layer].wait()
        assert not load.has_failed
    assert torch.equal(sink.node.pool[[4, 9]], source.node.pool[[1, 5]])
    key = digest_key(*KEY, grant.grant_id)
    source.transfer.submit(Finalize(KEY, grant, 0, (1, 5), 8, key, ()))
    ready = source.wait_for(ReadySent).ready
    assert ready.digests == block_digests(sink.node.pool, [4, 9], key, 8, 8).numpy().tobytes()


@pytest.mark.parametrize("layer", range(3))
def test_a_wrong_layer_makes_the_step_void_and_holds_nothing_up(sides, layer: int) -> None:
    source, sink = sides
    grant, told = pushed(source, sink)
    sink.node.pool[9, 1, layer, 0, 3, 2] += 1
    load = sink.transfer.gates.load_of(grant.grant_id)
    gates = load.start(sink.node.pool)
    for message in told:
        sink.transfer.submit(VerifyLayers(message))
    for gate in gates.values():
        gate.wait()
    assert has_failed(load)


@pytest.mark.parametrize("change", [{"grant_signature": b"another's"}, {"grant_id": 7}, {"num_layers": 4}])
def test_what_is_not_of_this_grant_is_not_heard(sides, change) -> None:
    source, sink = sides
    grant, told = pushed(source, sink)
    load = sink.transfer.gates.load_of(grant.grant_id)
    fields = {name: getattr(told[0], name) for name in told[0].__struct_fields__}
    sink.transfer.submit(VerifyLayers(KVLayers(**{**fields, **change})))
    sink.transfer.submit(VerifyLayers(told[0]))
    load.start(sink.node.pool)[0].wait()
    assert not load.has_failed


def test_what_does_not_come_is_not_waited_for_for_long(sides) -> None:
    source, sink = sides
    grant = sink.node.grant(source.node.info, [4, 9])
    arrivals = Arrivals(grant)
    arrivals.let_through(1)
    arrivals.wait_for(0, deadline=0.0)
    assert not arrivals.has_failed
    arrivals.wait_for(1, deadline=time.monotonic() + 0.01)
    assert arrivals.has_failed


@pytest.mark.parametrize("arrived", [True, False])
def test_the_end_of_a_pull_lets_everything_through(sides, arrived: bool) -> None:
    source, sink = sides
    grant = sink.node.grant(source.node.info, [4, 9])
    sink.transfer.gates.expect(grant)
    load = sink.transfer.gates.load_of(grant.grant_id)
    gates = load.start(sink.node.pool)
    threading.Timer(0.02, sink.transfer.gates.end, (grant.grant_id, arrived)).start()
    for gate in gates.values():
        gate.wait()
    assert load.has_failed is not arrived
    sink.transfer.gates.end(grant.grant_id, arrived)


@pytest.mark.parametrize("shape", [(12, 2, 3, 2, 8, 4), (5, 3, 4, 2, 16, 80)])
def test_sums_of_layers_make_the_digests(shape: tuple[int, ...]) -> None:
    pool = torch.randn(shape).to(torch.bfloat16)
    sums = BlockSums.of_none(pool, 3, 77)
    for layers in (range(1, shape[2]), range(1)):
        sums.add_layers(pool, list_rows([4, 0, 3], shape[4], pool.device), layers)
    assert torch.equal(sums.digests(shape[4], shape[4]), block_digests(pool, [4, 0, 3], 77, shape[4], shape[4]))


# --- the step that waits for them --------------------------------------------------------------------------------


class Pulling(NoTiers):
    """Brings the prompt's first four blocks under its first step, into blocks that something else holds."""

    def __init__(self, harness: Harness, fails: bool) -> None:
        self.harness, self.has_failed = harness, fails
        self.blocks = harness.pool.allocate_grantable(4) or []
        self.has_joined = self.is_loading = False

    def prepare(self, request: Request, hashes, hits, runs_alone: bool) -> int | None:
        return 4 * BLOCK if runs_alone and not self.has_joined else 0

    def under_way(self, request: Request) -> list[int]:
        return self.blocks

    def load_with_step(self, request: Request, block_ids, hashes) -> None:
        assert block_ids == self.blocks
        request.awaits_pull = request.awaits_step = self.has_joined = self.is_loading = True

    def step_meta(self, step_id: int, meta: object | None) -> object | None:
        is_loading, self.is_loading = self.is_loading, False
        return StepLoads((self,)) if is_loading else meta

    def run(self) -> None:
        if not self.has_failed:
            self.harness.runner.peer_writes(self.blocks, PROMPT[: 4 * BLOCK])


def pulling(fails: bool) -> tuple[Harness, Pulling]:
    harness = Harness()
    harness.scheduler.tiers = tiers = Pulling(harness, fails)
    harness.external.update(tiers.blocks)
    return harness, tiers


def test_a_request_starts_on_blocks_that_are_still_coming() -> None:
    harness, tiers = pulling(fails=False)
    request = harness.add("r", PROMPT, max_tokens=4)
    harness.step()
    assert request.block_ids[:4] == tiers.blocks
    harness.step()
    assert not request.awaits_step
    assert not harness.pool.cached_hashes(), "nothing is offered before the pull has been committed"
    request.awaits_pull = False
    harness.run()
    harness.assert_output("r")
    assert harness.runner.num_computed_tokens == len(PROMPT) - 4 * BLOCK + 3
    assert harness.pool.find(request.block_hashes[0]) is None, "who pulls offers what was pulled"
    assert request.num_cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("mode", ["full", "prefill"])
def test_what_did_not_come_is_computed_and_nothing_of_the_void_step_is_seen(mode: str) -> None:
    harness, tiers = pulling(fails=True)
    request = harness.add("r", PROMPT, max_tokens=4, mode=mode)
    harness.run()
    assert harness.scheduler.num_preemptions == 1
    assert not request.awaits_pull
    if mode == "full":
        harness.assert_output("r")
    assert not set(request.block_ids) & set(tiers.blocks)


def test_steps_launched_on_a_void_one_are_dropped_too() -> None:
    """The next token of the same request was already on its way when the first was found void."""
    harness, _ = pulling(fails=True)
    harness.add("r", PROMPT, max_tokens=4)
    harness.step()
    harness.step()
    assert harness.requests["r"].num_stale == harness.requests["r"].num_in_flight
    harness.add("beside", [5, 6, 7], max_tokens=3)
    harness.run()
    for name in ("r", "beside"):
        harness.assert_output(name)


# --- who asks, and for whom ---------------------------------------------------------------------------------------


def granted_pull(s_per_token: float = 0.0, have_begun: bool = True) -> tuple[PullWorld, Request]:
    """Of five blocks; seven were asked for. The asker may start now; what a token of the holder's pulls takes it knows
    if that is given."""
    world = PullWorld(16, 16, joins=True)
    world.nodes[1].gates.have_begun = have_begun
    world.submit(0, chain(1, 5))
    world.schedule()
    for _ in range(2 if s_per_token else 0):
        world.nodes[1].asker.rates.measured(world.nodes[0].info.node_id, 100, 100 * s_per_token, world.now)
    request = world.submit(1, chain(1, 7), holder=0)
    world.schedule()
    world.deliver(world.post[0])  # the question
    world.deliver(world.post[0])  # the claim: granted
    world.schedule()
    return world, request


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_pull_that_would_hold_a_step_up_for_long_comes_before_it(by_layer: bool) -> None:
    seconds = UNDER_STEP_S * (0.9 if by_layer else 1.1)
    world, _ = granted_pull(seconds / (7 * BLOCK))
    assert world.nodes[1].asker.counters.joined == by_layer
    world.run()
    world.check_whole()


def test_a_pull_under_a_step_counts_until_it_had_come() -> None:
    world = PullWorld(16, 16, joins=True)
    world.tick(0.0)
    asker, gates = world.nodes[1].asker, world.nodes[1].gates
    for seed in (1, 2):
        world.submit(0, chain(seed, 5))
        world.run()
        world.submit(1, chain(seed, 6), holder=0)
        world.schedule()
        gates.arrived_at = world.now + 0.01
        while asker.counters.joined < seed:
            world.deliver(world.post[0])
            world.schedule()
        world.tick(0.3)
        world.run()
    assert asker.counters.completed == 2
    assert asker.counters.seconds == pytest.approx(2 * 0.01)
    assert asker.fetch_rates()[1] == {"a": pytest.approx(0.01 / (5 * BLOCK))}, "the first pays for connections"


def test_a_request_waits_outside_of_the_batch_until_the_first_layers_have_come() -> None:
    world, _ = granted_pull(have_begun=False)
    node = world.nodes[1]
    assert node.asker.counters.joined == 0
    node.gates.have_begun = True
    world.schedule()
    assert node.asker.counters.joined == 1
    world.run()
    world.check_whole()


def test_a_granted_pull_is_joined_by_a_request_alone_and_found_by_others_when_it_is_there() -> None:
    world, request = granted_pull()
    node = world.nodes[1]
    assert [each for each, _ in node.running] == [request]
    assert node.asker.counters.joined == 1
    assert request.awaits_pull
    assert node.pool.match_prefix(chain(1, 5)) == []
    while world.post or any(each.jobs for each in world.nodes):
        for each in world.nodes:
            if each.jobs:
                world.transfer(each)
        if world.post:
            world.deliver(world.post[0])
    assert not request.awaits_pull
    assert len(node.pool.match_prefix(chain(1, 5))) == 5
    world.run()
    world.check_whole()
