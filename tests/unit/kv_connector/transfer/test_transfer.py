"""The transfer thread between two nodes of this process, over each transport."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVReady
from tandem.engine.contracts.wire.parts import FirstToken
from tandem.kernels.blocks.digest import block_digests
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    Finalize,
    PushFailed,
    ReadySent,
    Retire,
    Retired,
    Verified,
    Verify,
    digest_key,
)
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tandem.kv_connector.transports.mapped.cuda_ipc import CudaMapping
from tests.fakes.kv_pools import MEGABYTE_BLOCKS, PoolNode, needs
from tests.fakes.transfer_side import Side, pairs

KEY = AttemptKey("r", 0)
ALL = ["local", "shm", pytest.param("nixl", marks=needs("nixl")), "tcp"]


@pytest.fixture
def make_sides():
    with pairs() as made:

        def make(transport: str, fault_injection: str = "", **kwargs) -> tuple[Side, Side]:
            nodes = (PoolNode(name, transport, seed=seed, **kwargs) for seed, name in ((1, "p"), (2, "d")))
            return made.make(*nodes, fault_injection)

        yield make


def whole(grant, sources, destinations, num_valid=None) -> BlockPush:
    valid = tuple(num_valid or [8] * len(sources))
    return BlockPush(KEY, grant, tuple(sources), tuple(destinations), valid, -1)


def layer_push(grant, sources, destinations, num_valid) -> BlockPush:
    return BlockPush(KEY, grant, tuple(sources), tuple(destinations), tuple(num_valid))


def finalize(grant, sources, num_valid_last=8, round=0, **changes) -> Finalize:
    key = digest_key(grant.key, grant.grant_id)
    return Finalize(KEY, grant, round, tuple(sources), num_valid_last, key, (FirstToken(0, 42, False),), **changes)


def verify(grant, ready: KVReady, num_valid_last=8) -> Verify:
    key = digest_key(grant.key, grant.grant_id)
    return Verify(KEY, grant.grant_id, ready.round, grant.block_ids, ready.digests, key, num_valid_last)


@pytest.mark.parametrize("transport", ALL)
def test_a_hand_off_from_pushes_to_verified(make_sides, transport):
    source, sink = make_sides(transport)
    grant = sink.node.grant(source.node.info, [4, 9, 2])
    before = sink.node.pool[2].clone()
    source.transfer.submit(whole(grant, [1], [4]))
    for layer in range(3):
        source.transfer.submit_layers(layer_push(grant, [5, 6], [9, 2], [8, 3]), range(layer, layer + 1))
    source.transfer.submit(finalize(grant, [1, 5, 6], num_valid_last=3))
    event = source.wait_for(ReadySent)
    assert source.sent == [(sink.node.info.key, event.ready)]
    ready = event.ready
    assert (ready.request_id, ready.attempt, ready.grant_id, ready.round) == ("r", 0, grant.grant_id, 0)
    assert (ready.source_id, ready.source_epoch, ready.sink_epoch) == ("p", source.node.epoch, sink.node.epoch)
    assert ready.first_tokens == (FirstToken(0, 42, False),)
    assert len(ready.digests) == 3 * 8
    before[:, :, :, :3] = source.node.pool[6][:, :, :, :3]
    assert torch.equal(sink.node.pool[2], before)
    sink.transfer.submit(verify(grant, ready, num_valid_last=3))
    assert sink.wait_for(Verified) == Verified(KEY, grant.grant_id, 0, ())
    source.transfer.submit(Retire(KEY, grant))
    assert source.wait_for(Retired) == Retired(KEY, grant.grant_id)
    assert source.transfer.counters["kv_pushed_bytes"] == (2 * 8 + 3) * source.node.layout.payload_bytes / 8


@pytest.mark.parametrize("transport", ALL)
def test_a_corrupt_block_is_named_and_a_resend_mends_it(make_sides, transport):
    source, sink = make_sides(transport, "corrupt:2")
    grant = sink.node.grant(source.node.info, [4, 9])
    for origin, block in [(1, 4), (5, 9)]:
        source.transfer.submit(whole(grant, [origin], [block]))
    source.transfer.submit(finalize(grant, [1, 5]))
    sink.transfer.submit(verify(grant, source.wait_for(ReadySent).ready))
    assert sink.wait_for(Verified).bad_indices == (1,)
    assert sink.transfer.counters["kv_blocks_bad"] == 1
    source.transfer.submit(whole(grant, [5], [9]))
    source.transfer.submit(finalize(grant, [1, 5], round=1))
    again = source.wait_for(ReadySent, 2).ready
    assert again.round == 1
    sink.transfer.submit(verify(grant, again))
    assert sink.wait_for(Verified, 2) == Verified(KEY, grant.grant_id, 1, ())


def test_digests_belong_to_their_grant_and_may_be_left_out(make_sides):
    source, sink = make_sides("local")
    grant = sink.node.grant(source.node.info, [4])
    source.transfer.submit(whole(grant, [1], [4]))
    source.transfer.submit(finalize(grant, [1]))
    source.transfer.submit(finalize(grant, [1], with_digests=False))
    first = source.wait_for(ReadySent).ready
    assert source.wait_for(ReadySent, 2).ready.digests == b""
    key = digest_key(AttemptKey("r", 0), grant.grant_id)
    assert first.digests == block_digests(source.node.pool, [1], key, 8, 8).numpy().astype("<i8").tobytes()
    other = Verify(KEY, grant.grant_id, 0, (4,), first.digests, key ^ 1, 8)
    sink.transfer.submit(other)
    assert sink.wait_for(Verified).bad_indices == (0,)
    sink.transfer.submit(Verify(KEY, grant.grant_id, 1, (4, 5), first.digests, key, 8))
    assert sink.wait_for(Verified, 2).bad_indices == (0, 1)  # too few digests: nothing can be trusted
    sink.transfer.submit(Verify(KEY, grant.grant_id, 2, (999,), np.zeros(1, "<i8").tobytes(), key, 8))
    assert sink.wait_for(Verified, 3).bad_indices == (0,)
    for number, digests in enumerate((b"", first.digests[:-1]), 4):  # no whole numbers: they cost the hand-off alone
        sink.transfer.submit(Verify(KEY, grant.grant_id, 2, (4,), digests, key, 8))
        assert sink.wait_for(Verified, number).bad_indices == (0,)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_failed_push_is_said_once_and_ends_the_grant_alone(make_sides, transport):
    source, sink = make_sides(transport)
    bad, good = sink.node.grant(source.node.info, [4]), sink.node.grant(source.node.info, [9])
    sink.node.transports.close_grant(bad.grant_id)
    for _ in range(3):
        source.transfer.submit(whole(bad, [1], [4]))
    source.transfer.submit(finalize(bad, [1]))
    source.transfer.submit(finalize(bad, [1]))
    source.transfer.submit(whole(good, [1], [9]))
    source.transfer.submit(finalize(good, [1]))
    assert source.wait_for(ReadySent).grant_id == good.grant_id
    failures = source.events_of(PushFailed)
    assert [(event.key, event.grant_id) for event in failures] == [(KEY, bad.grant_id)]
    assert "is not open" in failures[0].reason
    source.transfer.submit(Retire(KEY, bad))
    assert source.wait_for(Retired).grant_id == bad.grant_id
    assert source.lost == []


def test_a_push_without_a_channel_fails(make_sides):
    source, sink = make_sides("local")
    grant = sink.node.grant(source.node.info, [4])
    source.transfer.drop_peer(NodeKey("d", sink.node.epoch))  # not connected yet, perhaps
    source.transfer.submit(whole(grant, [1], [4]))
    other = PoolNode("elsewhere", "local").grant(source.node.info, [4], open=False)
    source.transfer.submit(whole(other, [1], [4]))
    wait_until(lambda: any(event.grant_id == other.grant_id for event in source.events_of(PushFailed)))
    assert "no channel to elsewhere" in source.events_of(PushFailed)[-1].reason


class GatedChannel:
    """Wraps a real channel; a write waits until the test lets it go."""

    def __init__(self, channel) -> None:
        self.channel, self.peer = channel, channel.peer
        self.max_write_bytes, self.sums_blocks = channel.max_write_bytes, channel.sums_blocks
        self.sums_layers = channel.sums_layers
        self.begun, self.go = threading.Event(), threading.Event()
        self.log: list[tuple] = []

    def write(self, write, pool=None) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        self.log.append(("write", write.grant.grant_id, len(write.pairs)))
        self.channel.write(write, pool)

    def flush(self, grant) -> None:
        self.log.append(("flush", grant.grant_id))
        self.channel.flush(grant)

    def close(self) -> None:
        self.go.set()
        self.channel.close()


@pytest.fixture
def gated():
    """(source side whose channel waits, sink node, the channel) with 1 MiB blocks: a write takes four of them."""
    node, sink = (PoolNode(name, "tcp", num_blocks=24, layout=MEGABYTE_BLOCKS) for name in ("p", "d"))
    sink.admit(node.info)
    channel = GatedChannel(node.transports.connect(node.info, sink.info, lambda *what: None))
    source = Side(node, connect=lambda peer, on_lost: channel)
    source.transfer.connect_peer(sink.info)
    yield source, sink, channel
    channel.go.set()
    assert source.transfer.stop(PATIENCE_S)
    node.close()
    sink.close()


def test_retire_drops_what_is_queued_and_stops_what_runs(gated):
    source, sink, channel = gated
    grant, other = sink.grant(source.node.info, range(16)), sink.grant(source.node.info, [20])
    source.transfer.submit(whole(grant, range(16), range(16), [64] * 16))
    source.transfer.submit_layers(layer_push(grant, [1], [1], [64]), range(1))
    source.transfer.submit(finalize(grant, range(16), num_valid_last=64))
    source.transfer.submit(whole(other, [3], [20], [64]))
    source.transfer.submit(finalize(other, [3], num_valid_last=64))
    assert channel.begun.wait(PATIENCE_S)
    source.transfer.submit(Retire(KEY, grant))
    assert source.events_of(Retired) == []
    channel.go.set()
    source.wait_for(Retired)
    source.transfer.submit_layers(layer_push(grant, [1], [1], [64]), range(1, 2))  # of a step that was launched before
    source.transfer.submit(Retire(KEY, other))
    source.wait_for(Retired, 2)
    # One write of four blocks had begun, no other of that grant followed; it was flushed before Retired.
    assert channel.log == [
        ("write", grant.grant_id, 4),
        ("write", other.grant_id, 1),
        ("flush", other.grant_id),
        ("flush", grant.grant_id),
    ]
    assert [event.grant_id for event in source.events_of(ReadySent)] == [other.grant_id]
    assert source.events_of(PushFailed) == []


def test_a_channel_says_how_much_goes_into_one_write(gated):
    source, sink, channel = gated
    channel.go.set()
    grant = sink.grant(source.node.info, range(16))
    pushes = [(4 << 20, [4, 4, 4, 4]), (64 << 20, [16]), (6 << 20, [6, 6, 4])]
    for number, (limit, _) in enumerate(pushes):
        channel.max_write_bytes = limit
        source.transfer.submit(whole(grant, range(16), range(16), [64] * 16))
        source.transfer.submit(finalize(grant, range(16), num_valid_last=64))
        source.wait_for(ReadySent, number + 1)
    sizes = [entry[2] for entry in channel.log if entry[0] == "write"]
    assert sizes == [size for _, expected in pushes for size in expected]


@pytest.mark.parametrize("transport", ALL)
def test_every_channel_names_its_limit(transport):
    with closing(PoolNode("p", transport)) as source, closing(PoolNode("d", transport)) as sink:
        sink.admit(source.info)
        channel = source.connect(sink.info)
    limit = (8 if transport == "nixl" else 4) << 20
    assert channel.max_write_bytes == limit
    assert FaultInjector(channel, parse_faults("drop:1")).max_write_bytes == limit
    assert CudaMapping.max_write_bytes == 256 << 20


def test_stop_runs_what_is_queued(gated):
    source, sink, channel = gated
    channel.go.set()
    grant = sink.grant(source.node.info, [0])
    source.transfer.submit(whole(grant, [3], [0], [64]))
    source.transfer.submit(finalize(grant, [3], num_valid_last=64))
    assert source.transfer.stop(PATIENCE_S)
    assert len(source.events_of(ReadySent)) == 1
    assert torch.equal(sink.pool[0], source.node.pool[3])


def test_stop_breaks_channels_past_its_deadline(gated):
    source, sink, channel = gated
    grant = sink.grant(source.node.info, [0])
    source.transfer.submit(whole(grant, [3], [0], [64]))
    assert channel.begun.wait(PATIENCE_S)
    source.transfer.stop(0.05)
    wait_until(lambda: len(source.events_of(PushFailed)) == 1, "the end of what was under way")


def test_a_peer_that_cannot_be_reached_is_reported_lost(make_sides):
    source, _ = make_sides("tcp")
    gone = PoolNode("gone", "tcp")
    gone.close()
    source.transfer.connect_peer(gone.info)
    wait_until(lambda: len(source.lost) == 1)
    assert source.lost[0][0] == ("gone", gone.epoch)


def test_losing_a_peer_fails_its_pushes_and_is_reported_once(make_sides):
    source, sink = make_sides("tcp")
    grant = sink.node.grant(source.node.info, [4])
    source.transfer.submit(whole(grant, [1], [4]))
    source.transfer.submit(finalize(grant, [1]))
    source.wait_for(ReadySent)
    sink.node.close()
    source.transfer.submit(finalize(grant, [1]))
    assert source.wait_for(PushFailed).grant_id == grant.grant_id
    assert [lost[0] for lost in source.lost] == [("d", sink.node.epoch)]
    source.transfer.submit(Retire(KEY, grant))
    source.wait_for(Retired)
