"""Digests that a channel takes up while it writes, as the GPU's copy kernel does: when they hold, and when not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import push_groups
from tandem.engine.contracts.wire.parts import FirstToken
from tandem.engine.device.cuda_driver import merged_runs
from tandem.kernels.blocks import digest
from tandem.kernels.blocks.move_blocks import BlockPlaces
from tandem.kv_connector.layouts.block_runs import block_runs
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize, ReadySent, Verified, Verify, digest_key
from tandem.kv_connector.transfer.waiting_jobs import WaitingJobs
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tandem.kv_connector.transports.mapped.cuda_ipc import CopyPath, way_of
from tests.fakes.kv_pools import PoolNode
from tests.fakes.transfer_side import Side

KEY = AttemptKey("r", 0)


class SummingChannel:
    """A real channel, and sums as the kernel adds them up: words that are not moved count as zeros."""

    sums_blocks = sums_layers = True
    writes_in_stream = False

    def __init__(self, channel) -> None:
        self.channel, self.source, self.num_summed = channel, channel.source, 0
        self.peer = channel.peer
        self.max_write_bytes = channel.max_write_bytes

    def write(self, write, pool=None) -> None:
        self.channel.write(write._replace(sums=None), pool)
        if write.sums is None:
            return
        pool, sums = self.source.pool_NHLPBD if pool is None else pool, write.sums.sums
        layers = write.span(pool.shape[2])
        span = slice(layers.start, layers.stop)
        for index, (source, _), valid in zip(write.sums.indices, write.pairs, write.num_valid, strict=True):
            moved = torch.zeros_like(pool[:1, ..., :valid, :])
            moved[0, :, span] = pool[source, :, span, :, :valid]
            sums.sums_N[index] += digest._sums_in_place(moved, torch.tensor([0]), sums.key)[0]
            self.num_summed += 1

    def flush(self, grant) -> None:
        self.channel.flush(grant)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def sides():
    """(source side, sink side, fault to inject from now on)"""
    made: list[Side] = []

    def make(faults: str = "drop:0") -> tuple[Side, Side, SummingChannel]:
        node, sink = PoolNode("p", "local", seed=1), Side(PoolNode("d", "local", seed=2))
        sink.node.admit(node.info)
        channel = SummingChannel(node.transports.connect(node.info, sink.node.info, lambda *what: None))
        source = Side(node, connect=lambda peer, on_lost: FaultInjector(channel, parse_faults(faults)))  # type: ignore[arg-type]
        made.extend((source, sink))
        source.transfer.connect_peer(sink.node.info)
        return source, sink, channel

    yield make
    for side in made:
        assert side.transfer.stop(5.0)
        side.node.close()


def push_all(source: Side, grant, origins, num_valid, whole=()) -> None:
    """Blocks in `whole` (places in the grant) at once, the others layer by layer, two to a push, last ones first."""
    layered = [place for place in range(len(origins)) if place not in whole]
    for place in whole:
        push = BlockPush(KEY, grant, (origins[place],), (grant.block_ids[place],), (num_valid[place],), -1)
        source.transfer.submit(push)
    for first in reversed(range(0, len(layered), 2)):
        places = layered[first : first + 2]
        columns = [tuple(of[place] for place in places) for of in (origins, grant.block_ids, num_valid)]
        for layer in range(3):
            source.transfer.submit_layers(BlockPush(KEY, grant, *columns), range(layer, layer + 1))


def verified(source: Side, sink: Side, grant, origins, valid, round=0) -> Verified:
    key = digest_key(KEY, grant.grant_id)
    source.transfer.submit(Finalize(KEY, grant, round, tuple(origins), valid, key, (FirstToken(0, 1, False),)))
    ready = source.wait_for(ReadySent, round + 1).ready
    sink.transfer.submit(Verify(KEY, grant.grant_id, round, grant.block_ids, ready.digests, key, valid))
    return sink.wait_for(Verified, round + 1)


def test_sums_of_layers_and_whole_blocks_make_the_digests(sides) -> None:
    source, sink, channel = sides()
    grant = sink.node.grant(source.node.info, [4, 9, 2, 7])
    push_all(source, grant, [1, 5, 6, 3], [8, 8, 8, 3], whole=[1])
    assert verified(source, sink, grant, [1, 5, 6, 3], 3).bad_indices == ()
    assert channel.num_summed == 1 + 3 * 3
    assert source.transfer.counters["kv_digest_passes"] == 0


def test_a_corrupt_block_is_found_and_its_resend_is_digested_anew(sides) -> None:
    source, sink, _ = sides("corrupt:2")
    grant = sink.node.grant(source.node.info, [4, 9])
    push_all(source, grant, [1, 5], [8, 8])
    assert verified(source, sink, grant, [1, 5], 8).bad_indices == (0,)
    source.transfer.submit(BlockPush(KEY, grant, (1,), (4,), (8,), -1))
    assert verified(source, sink, grant, [1, 5], 8, round=1).bad_indices == ()
    assert source.transfer.counters["kv_digest_passes"] == 1


@pytest.mark.parametrize("again", [0, 2])
def test_what_was_pushed_twice_is_digested_in_a_pass(sides, again) -> None:
    """The sums count it twice, and the digests are those of what arrived all the same."""
    source, sink, _ = sides()
    grant = sink.node.grant(source.node.info, [4, 9])
    source.transfer.submit_layers(BlockPush(KEY, grant, (1,), (4,), (8,)), range(again, again + 1))
    push_all(source, grant, [1, 5], [8, 8])
    assert verified(source, sink, grant, [1, 5], 8).bad_indices == ()
    assert source.transfer.counters["kv_digest_passes"] == 1


def test_copies_that_continue_each_other_become_one() -> None:
    runs = [(100, 0, 10), (110, 10, 10), (120, 30, 10), (140, 40, 10), (150, 50, 10)]
    merged = merged_runs(*(np.array(column, dtype=np.uint64) for column in zip(*runs, strict=True)))
    assert list(zip(*(column.tolist() for column in merged), strict=True)) == [
        (100, 0, 20),
        (120, 30, 10),
        (140, 40, 20),
    ]


@pytest.mark.parametrize(("heads", "layers"), [(range(3), range(4)), (range(3), range(1, 3)), (range(1, 3), range(2))])
def test_runs_of_layers_move_just_these(heads: range, layers: range) -> None:
    """Into a pool with padding between blocks, byte by byte as the runs say."""
    source = torch.arange(5 * 3 * 4 * 2 * 8 * 2, dtype=torch.int16).view(5, 3, 4, 2, 8, 2)
    rows = torch.full((6, source[0].numel() + 7), -1, dtype=torch.int16)
    target = rows[:, : source[0].numel()].unflatten(1, source.shape[1:])
    expected = target.clone()
    for here, there in [(4, 0), (1, 5), (2, 1)]:
        expected[there, heads.start : heads.stop, layers.start : layers.stop] = source[
            here, heads.start : heads.stop, layers.start : layers.stop
        ]
    runs = block_runs(BlockPlaces.of(source), BlockPlaces.of(target), [(4, 0), (1, 5), (2, 1)], heads, layers)
    for to, origin, nbytes in zip(*(column.tolist() for column in merged_runs(*runs)), strict=True):
        ctypes.memmove(to, origin, nbytes)
    assert torch.equal(target, expected)
    assert (rows[:, source[0].numel() :] == -1).all()


def test_which_way_blocks_go() -> None:
    """Of 32 layers: all at once, those with more behind them, the last one; and runs too short for a copy engine."""
    assert way_of(32, 0, 32, 32 << 10) == (CopyPath.BLOCKS, 0)
    assert [way_of(32, layers.start, len(layers), 32 << 10)[0] for layers in push_groups(32)] == [
        *[CopyPath.ROWS] * 8,
        CopyPath.KERNEL,
    ]
    assert way_of(32, 31, 1, 32 << 10)[1] > way_of(32, 4, 4, 512)[1]
    assert way_of(32, 4, 4, 512)[0] is way_of(2, 0, 2, 4 << 10)[0] is CopyPath.KERNEL


@pytest.mark.parametrize("num_layers", [1, 2, 5, 9, 32, 80])
def test_each_layer_is_pushed_once_and_the_last_one_alone(num_layers: int) -> None:
    groups = push_groups(num_layers)
    assert [layer for layers in groups for layer in layers] == list(range(num_layers))
    assert groups[-1] == range(num_layers - 1, num_layers)


class Event:
    def __init__(self) -> None:
        self.has_fired = False

    def query(self) -> bool:
        return self.has_fired


def test_layers_wait_until_they_are_written_and_keep_their_grants_order() -> None:
    waiting: WaitingJobs[str] = WaitingJobs()
    events = [Event() for _ in range(3)]
    for grant_id, name in ((1, "a"), (2, "b")):
        for index, event in enumerate(events):
            waiting.add(grant_id, f"{name}{index}", event, goes_ahead=index == 2)
    assert waiting.take_next() is None
    events[1].has_fired = True
    assert waiting.take_next() is None, "the ones before them have not gone"
    events[0].has_fired = True
    taken = [waiting.take_next() for _ in range(7)]
    assert taken == ["a0", "a1", "a2", "b0", "b1", "b2", None], "the last goes ahead of the device"
    assert not waiting


def test_nothing_goes_ahead_while_a_step_waits_for_a_peer() -> None:
    waiting: WaitingJobs[str] = WaitingJobs()
    event = Event()
    waiting.add(1, "last layer", event, goes_ahead=True)
    waiting.add(1, "end", None, goes_ahead=True)
    assert waiting.take_next(may_go_ahead=False) is None
    assert not waiting.are_written(1)
    assert waiting.are_written(2)
    event.has_fired = True
    assert waiting.are_written(1)
    assert [waiting.take_next(may_go_ahead=False) for _ in range(3)] == ["last layer", "end", None]


def test_grants_pass_each_other() -> None:
    waiting: WaitingJobs[str] = WaitingJobs()
    late, written = Event(), Event()
    written.has_fired = True
    for grant_id, name, event in ((1, "a0", late), (1, "a1", written), (2, "b0", written)):
        waiting.add(grant_id, name, event, goes_ahead=False)
    assert [waiting.take_next() for _ in range(2)] == ["b0", None]
    late.has_fired = True
    assert [waiting.take_next() for _ in range(3)] == ["a0", "a1", None]


def test_whatever_else_there_is_of_a_grant_comes_behind_its_layers() -> None:
    waiting: WaitingJobs[str] = WaitingJobs()
    for grant_id in (1, 2, 1):
        waiting.add(grant_id, f"{grant_id}", Event(), goes_ahead=False)
    assert waiting.take_all_of(1) == ["1", "1"]
    assert waiting.take_all_of(3) == []
    assert waiting.take_all_of(None) == ["2"]
