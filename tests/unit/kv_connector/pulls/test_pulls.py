"""Pulls between nodes without I/O: whatever is lost, doubled, late, corrupted or evicted, no byte is ever wrong, every
request starts, and in the end every block is free."""

from __future__ import annotations

import random

import pytest
from pull_world import BLOCK, PullNode, PullWorld, chain

from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.wire.handoff import KVClaim, KVGrant, KVPull, KVRelease
from tandem.kv_connector.protocol import outcomes


def kinds(world: PullWorld) -> list[type]:
    return [type(message) for _, _, message in world.post]


def warm(world: PullWorld, node: int, hashes: list[bytes]) -> None:
    world.submit(node, hashes)
    world.schedule()


def asking(*num_blocks: int) -> PullWorld:
    """Node 1 is about to ask node 0 for a prompt of five blocks, all of which that has."""
    world = PullWorld(*num_blocks)
    warm(world, 0, chain(1, 5))
    world.submit(1, chain(1, 5), holder=0)
    world.schedule()
    return world


@pytest.mark.parametrize("one_sided", [False, True])
def test_what_a_peer_has_is_not_computed(one_sided: bool) -> None:
    world = PullWorld(16, 16, one_sided=one_sided)
    warm(world, 0, chain(1, 5))
    world.submit(1, chain(1, 7), holder=0)
    world.run()
    puller = world.nodes[1].puller
    assert (puller.counters.completed, puller.counters.tokens) == (1, 5 * BLOCK)
    assert world.nodes[1].num_computed == 2
    world.check_whole()


def test_own_hits_are_not_asked_for_and_the_claim_says_how_much_there_is() -> None:
    world = PullWorld(16, 16)
    warm(world, 0, chain(1, 5))
    warm(world, 1, chain(1, 2))
    world.submit(1, chain(1, 7), holder=0)
    world.schedule()
    (question,) = world.post
    assert isinstance(question[2], KVPull)
    assert question[2].first_block == 2
    world.deliver(question)
    (answer,) = world.post
    assert isinstance(answer[2], KVClaim)
    assert answer[2].num_prompt_tokens == 3 * BLOCK
    world.run()
    assert world.nodes[1].num_computed == 2 + 2
    world.check_whole()


def test_evicted_meanwhile_means_no() -> None:
    world = asking(8, 16)
    warm(world, 0, chain(2, 8))
    world.deliver(world.post[0])
    assert kinds(world) == [KVRelease]
    world.run()
    assert world.nodes[1].puller.counters.failed == 1
    assert world.nodes[1].num_computed == 5
    world.check_whole()


def test_what_is_offered_can_not_be_evicted() -> None:
    world = asking(8, 16)
    world.deliver(world.post[0])
    world.submit(0, chain(2, 8))
    world.schedule()
    assert world.nodes[0].waiting, "it needs the blocks that are being pulled"
    world.run()
    assert world.nodes[1].puller.counters.completed == 1
    world.check_whole()


def test_pulls_pin_half_of_a_holders_pool_at_most() -> None:
    world = PullWorld(8, 16)
    for hashes in (chain(1, 5), chain(2, 2)):
        warm(world, 0, hashes)
        world.submit(1, hashes, holder=0)
    world.schedule()
    for question in list(world.post):
        world.deliver(question)
    assert kinds(world) == [KVClaim, KVRelease]
    (_, _, claim), (_, _, release) = world.post
    assert claim.num_prompt_tokens == 4 * BLOCK
    assert release.reason == outcomes.BUSY
    world.run()
    assert world.nodes[1].num_computed == 1 + 2
    world.check_whole()


def test_what_a_step_still_computes_is_not_offered() -> None:
    world = PullWorld(16, 16)
    pool, hashes = world.nodes[0].pool, chain(1, 5)
    blocks = pool.allocate(5)
    assert blocks is not None
    pool.step_launched(1)
    for index, (block_id, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
        world.nodes[0].content[block_id] = block_hash
        pool.register(block_id, block_hash, hashes[index - 1] if index else None, 1 if index >= 3 else None)
    world.submit(1, hashes, holder=0)
    world.schedule()
    world.deliver(world.post[0])
    (claim,) = (message for _, _, message in world.post)
    assert claim.num_prompt_tokens == 3 * BLOCK
    pool.step_completed(1)
    pool.free(blocks, 1)
    world.run()
    world.check_whole()


def test_a_lost_question_is_asked_again_and_a_silent_peer_given_up() -> None:
    world = asking(16, 16)
    world.post.clear()
    world.tick(0.6)
    assert kinds(world) == [KVPull]
    for _ in range(10):
        world.post.clear()
        world.tick(0.6)
    assert world.nodes[1].puller.counters.failed == 1
    world.run()
    assert world.nodes[1].num_computed == 5
    world.check_whole()


def test_a_second_request_waits_for_the_first_ones_pull() -> None:
    world = PullWorld(16, 16)
    warm(world, 0, chain(1, 5))
    for holder in (0, 0, None):
        world.submit(1, chain(1, 5), holder=holder)
    world.run()
    assert world.nodes[1].puller.counters.asked == 1
    assert world.nodes[1].num_computed == 0
    world.check_whole()


def test_no_room_is_no_reason_to_wait() -> None:
    """What others hold here leaves no block for what would come; the peer is told to stop."""
    world = asking(16, 8)
    taken = world.nodes[1].pool.allocate(5)
    assert taken is not None
    world.deliver(world.post[0])
    world.deliver(world.post[0])
    assert world.nodes[1].puller.counters.failed == 1
    world.nodes[1].pool.free(taken, None)
    world.run()
    world.check_whole()


def test_giving_way_gives_everything_back() -> None:
    world = asking(16, 16)
    world.deliver(world.post[0])
    world.deliver(world.post[0])  # the claim: granted
    assert not world.nodes[1].pool.reservations.make_room(16, Kind.RUN), "what was granted is not safe yet"
    world.run()
    world.check_whole()
    assert world.nodes[1].num_computed == 5


def test_an_offer_is_withdrawn_before_a_sequence_is_preempted_unless_it_is_granted() -> None:
    world = asking(16, 16)
    world.deliver(world.post[0])
    pool = world.nodes[0].pool
    assert not pool.reservations.make_room(16, Kind.CLAIM), "it would end by itself"
    assert pool.reservations.make_room(16, Kind.RUN)
    world.run()
    world.check_whole()
    assert (world.nodes[1].num_computed, world.nodes[1].puller.counters.failed) == (5, 1)
    world = asking(16, 16)
    world.deliver(world.post[0])
    for kind in (KVClaim, KVGrant):
        world.deliver(next(letter for letter in world.post if isinstance(letter[2], kind)))
    assert not world.nodes[0].pool.reservations.make_room(16, Kind.RUN)
    world.run()
    world.check_whole()
    assert world.nodes[1].num_computed == 0


def test_a_slow_peer_is_not_asked_until_that_is_long_ago() -> None:
    world = PullWorld(16, 16)
    puller = world.nodes[1].puller
    puller.compute_rate.measured(1, 0.01)
    assert puller.fetch_rates() == (pytest.approx(0.0025), {})
    puller.rates.measured("a", 100, 9.0, world.now)
    assert puller.fetch_rates() == (pytest.approx(0.0025), {}), "the first pays for connections"
    puller.rates.measured("a", 100, 2.0, world.now)
    assert puller.fetch_rates() == (pytest.approx(0.02), {"a": pytest.approx(0.02)})
    warm(world, 0, chain(1, 5))
    world.submit(1, chain(1, 5), holder=0)
    world.run(2)
    assert (puller.counters.declined, puller.counters.asked) == (1, 0)
    world.nodes[1].pool.flush()
    world.tick(60.0)
    assert puller.fetch_rates() == (pytest.approx(0.0025), {})
    world.submit(1, chain(1, 5), holder=0)
    world.run(2)
    assert (puller.counters.declined, puller.counters.completed) == (1, 1)
    world.check_whole()


def test_a_pull_that_took_too_long_counts_as_slow() -> None:
    world = PullWorld(16, 16)
    puller = world.nodes[1].puller
    puller.rates.measured("a", 1, 0.0, world.now)
    warm(world, 0, chain(1, 5))
    world.submit(1, chain(1, 5), holder=0)
    world.schedule()
    for _ in range(10):
        world.post.clear()
        world.tick(0.6)
    assert puller.fetch_rates()[1]["a"] >= 5.0 / (5 * BLOCK)
    world.run()
    world.check_whole()


def happen(world: PullWorld, rng: random.Random) -> None:
    """One thing out of all that can."""
    node: PullNode = rng.choice(world.nodes)
    kind = rng.random()
    if kind < 0.05:
        index = world.nodes.index(node)
        holder = rng.choice([None, *(other for other in range(len(world.nodes)) if other != index)])
        world.submit(index, chain(rng.randrange(2), rng.randrange(2, 7)), holder=holder)
    elif kind < 0.20:
        world.schedule()
    elif kind < 0.60:
        if world.post:
            world.deliver(rng.choice(world.post), keep=rng.random() < 0.1)
    elif kind < 0.90:
        if node.jobs:
            world.transfer(node, corrupt=rng.random() < 0.1)
    elif kind < 0.98:
        world.tick(rng.choice([0.02, 0.02, 0.1, 0.6]))
    elif rng.random() < 0.3:
        if world.post:
            world.post.remove(rng.choice(world.post))
    elif node.waiting and rng.random() < 0.3:
        world.cancel(node, rng.choice(node.waiting))
    elif rng.random() < 0.2:
        world.lose_each_other(*rng.sample(world.nodes, 2), forgets=rng.random() < 0.5)
    elif rng.random() < 0.2:
        node.pool.flush()
    else:
        world.tick(3.0)


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("num_seeds", [15, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_windows", [0, 1, 2])
def test_whatever_happens_in_tiny_pools(one_sided: bool, num_seeds: int, num_windows: int) -> None:
    """With window blocks: what is pulled ends in whole blocks, and nobody reads what was not brought."""
    completed, each = 0, 1 + num_windows
    for seed in range(num_seeds):
        rng = random.Random(seed)
        sizes = (9 * each, 8 * each, 12 * each)
        world = PullWorld(*sizes, one_sided=one_sided, rng=rng, num_windows=num_windows)
        for _ in range(500):
            happen(world, rng)
        world.run(40)
        world.check_whole()
        completed += sum(node.puller.counters.completed for node in world.nodes)
    assert completed > num_seeds, "little of this showed anything"
