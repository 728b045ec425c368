"""Pinned hits of tickets must not starve the claim that comes first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from pull_world import PullNode

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVGrant, KVReady
from tandem.engine.contracts.wire.parts import FirstToken, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.scheduling.prompt_order import AGED_AFTER_S
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import CloseGrant, OpenGrant, Verified, Verify
from tandem.kv_connector.protocol.outcomes import Commit
from tandem.kv_connector.sink.line import PATIENCE_S
from tandem.kv_connector.sink.manager import SinkManager
from tests.fakes.handoff_effects import take, take_messages
from tests.fakes.made_requests import made_request

SOURCE = NodeKey("p", 7)


def sink_of(pool: BlockPool, is_settled: Callable[[int], bool] = lambda grant_id: True) -> SinkManager:
    options = NodeOptions("decode", ModelOptions("m"), CacheOptions(block_size=4, hash_block_size=4))
    info = NodeInfo(node_id="d", epoch=9, role="decode")
    return SinkManager(info, ClusterKeys(b"k" * 16, False), pool, options, is_settled)


def expect(sink: SinkManager, name: str, num_tokens: int, hashes: list[bytes], priority: int = 0) -> int:
    prompt = np.zeros(num_tokens, np.int32)
    submit = Submit(
        request_id=name,
        attempt=0,
        mode="decode",
        prompt_token_ids=prompt.tobytes(),
        sampling=SamplingParams(),
        peer=PeerRef("p", 7, ""),
        priority=priority,
    )
    return sink.expect(submit, made_request(name, prompt, hashes=hashes, priority=priority), 0.0)


def register(pool: BlockPool, blocks: list[int], hashes: list[bytes]) -> None:
    for index, block in enumerate(blocks):
        pool.register(block, hashes[index], hashes[index - 1] if index else None)


def claim(sink: SinkManager, name: str, num_tokens: int, sink_epoch: int = 9) -> list[KVGrant]:
    message = KVClaim(
        request_id=name, attempt=0, source_id="p", source_epoch=7, sink_epoch=sink_epoch, num_prompt_tokens=num_tokens
    )
    sink.on_message(SOURCE, message, 1.0)
    return [sent for _, sent in take_messages(sink) if isinstance(sent, KVGrant)]


def test_a_ticket_behind_lets_its_pins_go_and_pins_again() -> None:
    pool = BlockPool(10, enable_caching=True)
    sink = sink_of(pool)
    cached = pool.allocate(8)
    assert cached is not None
    hashes = [bytes([i]) * 16 for i in range(8)]
    register(pool, cached, hashes)
    pool.free(cached, None)
    assert expect(sink, "small", 20, []) == 0
    assert expect(sink, "cached", 33, hashes) == 32
    (grant,) = claim(sink, "small", 20)
    assert len(grant.block_ids) == 5, "the first claim is served although the pins left only two blocks"
    assert claim(sink, "cached", 33) == []
    sink.check_integrity()
    sink.cancel(AttemptKey("small", 0), 2.0)
    drained = KVDrained(request_id="small", attempt=0, source_epoch=7, grant_id=grant.grant_id)
    sink.on_message(SOURCE, drained, 2.0)
    sink.check_integrity()
    (grant,) = [sent for _, sent in take_messages(sink) if isinstance(sent, KVGrant)]
    assert grant.first_block > 0, "what is left of the prefix is pinned again"
    sink.cancel(AttemptKey("cached", 0), 3.0)
    sink.on_message(SOURCE, msgspec.structs.replace(drained, request_id="cached", grant_id=grant.grant_id), 3.0)
    assert pool.num_free == 10


def test_effects_stand_in_the_order_in_which_they_must_be_done() -> None:
    """In one turn: blocks whose grant ended are closed to its source before they are granted to another, who hears of
    it when they are open."""
    sink = sink_of(BlockPool(10, enable_caching=True))
    for name in ("first", "second"):
        expect(sink, name, 33, [])
    (grant,) = claim(sink, "first", 33)
    assert claim(sink, "second", 33) == []
    sink.drain_effects()
    sink.on_message(
        SOURCE, KVDrained(request_id="first", attempt=0, source_epoch=7, grant_id=grant.grant_id), 2.0
    )  # fmt: skip
    effects = [each.message if isinstance(each, Send) else each for each in sink.drain_effects()]
    close, opened, sent = (
        next(index for index, each in enumerate(effects) if isinstance(each, kind))
        for kind in (CloseGrant, OpenGrant, KVGrant)
    )
    assert close < opened < sent
    assert effects[close].grant_id == grant.grant_id
    assert effects[opened].grant is effects[sent]
    assert set(effects[sent].block_ids) & set(grant.block_ids)


def test_what_came_after_the_ticket_is_not_granted_again() -> None:
    pool = BlockPool(20, enable_caching=True)
    sink = sink_of(pool)
    hashes = [bytes([i]) * 16 for i in range(4)]
    assert expect(sink, "late", 18, hashes) == 0
    others = pool.allocate(3)
    assert others is not None
    register(pool, others, hashes)
    (grant,) = claim(sink, "late", 18)
    assert (grant.first_block, len(grant.block_ids)) == (3, 2)
    pool.free(others, None)
    sink.check_integrity()
    sink.cancel(AttemptKey("late", 0), 2.0)
    drained = KVDrained(request_id="late", attempt=0, source_epoch=7, grant_id=grant.grant_id)
    sink.on_message(SOURCE, drained, 2.0)
    assert pool.num_free == 20


def test_what_comes_twice_is_kept_once() -> None:
    pool = BlockPool(20, enable_caching=True)
    sink = sink_of(pool)
    hashes = [bytes([i]) * 16 for i in range(4)]
    committed: list[Commit] = []
    for name in ("first", "second"):
        expect(sink, name, 18, hashes)
    grants = {name: claim(sink, name, 18)[0] for name in ("first", "second")}
    for name, grant in grants.items():
        ready = KVReady(
            request_id=name,
            attempt=0,
            grant_id=grant.grant_id,
            grant_signature=grant.signature,
            source_id="p",
            source_epoch=7,
            sink_epoch=9,
            first_tokens=(FirstToken(0, 5, False),),
            digests=b"",
        )
        sink.on_message(SOURCE, ready, 1.0)
        (verify,) = take(sink, Verify)
        sink.on_transfer_event(Verified(verify.key, verify.grant_id, verify.round, ()), 1.0)
        (commit,) = take(sink, Commit)
        assert isinstance(commit, Commit)
        register(pool, list(commit.block_ids)[:4], hashes)
        committed.append(commit)
    first, second = (commit.block_ids for commit in committed)
    assert second[:4] == first[:4]
    assert second[4] != first[4], "the block that is not full is written by whoever decodes"
    assert pool.num_free == 20 - 6
    sink.check_integrity()
    for commit in committed:
        pool.free(list(commit.block_ids), None)
    assert pool.num_free == 20


def test_headroom_is_kept_only_while_somebody_can_grow() -> None:
    pool = BlockPool(10, enable_caching=True)
    sink = sink_of(pool)
    expect(sink, "a", 36, [])
    running = pool.allocate(1)
    assert running is not None
    assert claim(sink, "a", 36) == [], "nine blocks would leave no room for the running sequence"
    pool.free(running, None)
    sink.on_tick(2.0)
    assert [type(m) for _, m in take_messages(sink)] == [KVGrant]


def test_a_drained_is_not_believed_while_writes_may_land() -> None:
    pool = BlockPool(10, enable_caching=True)
    unsettled: set[int] = set()
    sink = sink_of(pool, is_settled=lambda grant_id: grant_id not in unsettled)
    expect(sink, "a", 20, [])
    (grant,) = claim(sink, "a", 20)
    unsettled.add(grant.grant_id)
    sink.cancel(AttemptKey("a", 0), 2.0)
    drained = KVDrained(request_id="a", attempt=0, source_epoch=7, grant_id=grant.grant_id)
    sink.on_message(SOURCE, drained, 2.0)
    assert sink.ledger.num_quarantined == 5
    assert pool.num_free == 5
    unsettled.clear()
    sink.on_message(SOURCE, drained, 3.0)
    assert pool.num_free == 10
    sink.check_integrity()


def test_what_is_being_checked_is_counted_until_the_answer() -> None:
    sink = sink_of(BlockPool(20, enable_caching=True))

    def ready(grant: KVGrant, round: int = 0) -> int:
        said = KVReady(
            request_id=grant.request_id, attempt=0, grant_id=grant.grant_id, grant_signature=grant.signature,
            source_id="p", source_epoch=7, sink_epoch=9, first_tokens=(), digests=b"d" * 24, round=round,
        )  # fmt: skip
        sink.on_message(SOURCE, said, 2.0)
        return sink.actions.num_verifying

    def verified(grant: KVGrant, round: int, bad: tuple[int, ...]) -> int:
        sink.on_transfer_event(Verified((grant.request_id, 0), grant.grant_id, round, bad), 2.0)
        return sink.actions.num_verifying

    for name in ("kept", "cancelled"):
        expect(sink, name, 10, [])
    (kept,), (cancelled,) = claim(sink, "kept", 10), claim(sink, "cancelled", 10)
    assert sink.actions.num_verifying == 0
    assert [ready(kept), ready(cancelled), verified(kept, 0, (1,))] == [1, 2, 1]
    sink.cancel(AttemptKey("cancelled", 0), 2.0)
    assert sink.actions.num_verifying == 0
    assert [ready(kept, 1), verified(kept, 1, ())] == [1, 0]
    assert sink.counters.commits == 1


class HeldForOthers:
    """Blocks that are held for a request of this node which lacks one more to start."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        self.pool, self.held = pool, pool.allocate(num_blocks) or []
        self.hold = pool.reservations.add(Kind.LOAD, num_blocks, self.give_back, self)

    def give_back(self) -> None:
        self.pool.free(self.held, None)
        self.pool.reservations.end(self.hold)
        self.held = []


def test_what_is_held_for_a_request_of_the_node_gives_way_to_the_first_claim() -> None:
    """Its hits are what that request lacks, and what is held for that request is what it lacks."""
    node = PullNode("d", 14)
    pool, sink = node.pool, node.sink
    cached = pool.allocate(8)
    assert cached is not None
    hashes = [bytes([i]) * 16 for i in range(8)]
    register(pool, cached, hashes)
    pool.free(cached, None)
    held = HeldForOthers(pool, 6)
    assert expect(sink, "cached", 33, hashes) == 32
    assert claim(sink, "cached", 33, sink_epoch=node.info.epoch) == []
    sink.on_tick(1.0)
    sink.on_tick(1.0 + 0.9 * PATIENCE_S)
    assert held.held, "who is about to start is let start"
    sink.on_tick(1.01 + PATIENCE_S)
    assert not held.held
    (grant,) = [message for _, message in take_messages(sink) if isinstance(message, KVGrant)]
    assert (grant.first_block, len(grant.block_ids)) == (8, 1)


def test_what_is_given_back_is_for_who_asked_and_not_for_the_line() -> None:
    pool = BlockPool(4, enable_caching=True)
    sink = sink_of(pool)
    running, one, two = pool.allocate(2), pool.allocate(1), pool.allocate(1)
    assert running is not None
    assert one is not None
    assert two is not None

    def give_back(blocks: list[int]) -> None:
        pool.free(blocks, None)
        blocks.clear()
        sink.on_tick(2.0)  # as at the end of a pull that is given up

    for blocks in (one, two):
        pool.reservations.add(Kind.PULL, 1, partial(give_back, blocks), "a request")
    expect(sink, "in line", 4, [])
    assert claim(sink, "in line", 4) == []
    assert pool.reservations.make_room(2, Kind.RUN)
    assert take_messages(sink) == []
    sink.on_tick(3.0)
    assert [type(message) for _, message in take_messages(sink)] == [KVGrant]


def test_tickets_hits_give_way_to_a_sequence_that_grows() -> None:
    """It lacks a block to go on, the claim in line waits for its end: its blocks are what the claim lacks."""
    node = PullNode("d", 14)
    pool, sink = node.pool, node.sink
    cached, running = pool.allocate(8), pool.allocate(6)
    assert cached is not None
    assert running is not None
    hashes = [bytes([i]) * 16 for i in range(8)]
    register(pool, cached, hashes)
    pool.free(cached, None)
    assert expect(sink, "cached", 33, hashes) == 32
    assert claim(sink, "cached", 33, sink_epoch=node.info.epoch) == []
    waiting = made_request("waits to start", np.zeros(4, np.int32))
    assert not pool.reservations.make_room(1, Kind.START, waiting), "a ticket is as good as what waits to start"
    assert pool.reservations.make_room(1, Kind.RUN)
    grown = pool.allocate(1)
    assert grown is not None
    sink.check_integrity()
    pool.free([*running, *grown], None)
    sink.on_tick(2.0)
    (grant,) = [sent for _, sent in take_messages(sink) if isinstance(sent, KVGrant)]
    assert grant.first_block >= 7, "what is left of the prefix is pinned again"
    assert grant.first_block + len(grant.block_ids) == 9


def test_who_matters_more_is_granted_first_and_nobody_starves() -> None:
    pool = BlockPool(10, enable_caching=True)
    sink = sink_of(pool)
    runs = pool.allocate(6)
    assert runs is not None
    for name, priority in (("low", 3), ("first", 1), ("second", 1), ("high", 0)):
        expect(sink, name, 20, [], priority)
        assert claim(sink, name, 20) == []
    line = [record.key.request_id for record in sink.line._queue]
    assert line == ["high", "first", "second", "low"]
    sink.on_tick(AGED_AFTER_S)
    expect(sink, "late", 20, [], 0)
    claim(sink, "late", 20)
    sink.on_tick(AGED_AFTER_S + 1.0)
    line = [record.key.request_id for record in sink.line._queue]
    assert line == ["low", "first", "second", "high", "late"], (
        "those that have waited long, in the order of their claims"
    )
    pool.free(runs, None)
    sink.on_tick(AGED_AFTER_S + 1.1)
    granted = [sent.request_id for _, sent in take_messages(sink) if isinstance(sent, KVGrant)]
    assert granted == ["low"], "9 of 10 blocks may be granted, and each needs 5"
    sink.check_integrity()
