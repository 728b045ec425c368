"""The worker half: which jobs a step's hooks queue, in which order, and that loads are waited for layer by layer."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import LayerPlace
from tandem.kv_connector.protocol.jobs import ArrivingKV, BlockPush, Flush, StepMoves
from tandem.kv_connector.transfer.layer_hooks import ConnectorWorker
from tandem.kv_connector.transfer.thread import TransferWorker
from tests.fakes.kv_pools import SMALL, PoolNode

LAYERS = {f"model.layers.{index}.attn": index for index in range(3)}
KEY = AttemptKey("r", 0)


class DeviceEvent:
    """Stands for a CUDA event: a step's layers are done when the test says so."""

    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done


class RecordingChannel:
    """A real channel that also writes down what passes, with the source bytes as they are at that moment."""

    def __init__(self, channel) -> None:
        self.channel, self.peer = channel, channel.peer
        self.max_write_bytes, self.sums_blocks = channel.max_write_bytes, channel.sums_blocks
        self.sums_layers = channel.sums_layers
        self.writes: list[tuple[tuple, range | None]] = []

    def write(self, write, pool=None) -> None:
        self.writes.append((tuple(write.pairs), write.layers))
        self.channel.write(write, pool)

    def flush(self, grant) -> None:
        self.channel.flush(grant)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def nodes():
    pair = PoolNode("p", "local", seed=1), PoolNode("d", "local", seed=2)
    pair[1].admit(pair[0].info)
    yield pair
    for node in pair:
        node.close()


@pytest.fixture
def channel(nodes):
    source, sink = nodes
    return RecordingChannel(source.connect(sink.info))


@pytest.fixture
def worker(nodes, channel):
    source, sink = nodes
    transfer = TransferWorker(
        source.pool,
        SMALL,
        source.info.key,
        lambda peer, on_lost: channel,
        lambda event: None,
        lambda to, message: None,
        lambda *what: None,
    )
    transfer.start()
    transfer.connect_peer(sink.info)
    made = ConnectorWorker(transfer, {name: LayerPlace(0, layer) for name, layer in LAYERS.items()})
    made.register_kv_cache(source.pool)
    yield made
    assert transfer.stop(PATIENCE_S)


def run_step(worker: ConnectorWorker, pool: torch.Tensor, meta: StepMoves | None, block: int, value: float) -> None:
    """A forward pass that fills `block` layer by layer."""
    if meta is not None:
        worker.start_load_kv(meta)
    for name, layer in LAYERS.items():
        worker.wait_for_kv_layer(name)
        pool[block, :, layer] = value + layer
        worker.save_kv_layer(name, pool[:, :, layer], object())
    worker.wait_for_save()


def test_layers_go_out_as_they_are_written_after_whole_blocks(nodes, channel, worker):
    source, sink = nodes
    grant = sink.grant(source.info, [7, 8, 9])
    old = BlockPush(KEY, grant, (2,), (7,), (8,), step_id=4)
    of_this_step = BlockPush(KEY, grant, (3,), (8,), (8,), step_id=5)
    new = BlockPush(KEY, grant, (1,), (9,), (5,))
    tail_before = sink.pool[9].clone()
    run_step(worker, source.pool, StepMoves(5, (new,), (old, of_this_step)), block=1, value=10.0)
    wait_until(lambda: len(channel.writes) == 4)
    assert channel.writes == [
        (((2, 7),), None),
        (((1, 9),), range(2)),
        (((1, 9),), range(2, 3)),
        (((3, 8),), None),
    ]
    wait_until(lambda: torch.equal(sink.pool[8], source.pool[3]))
    assert torch.equal(sink.pool[7], source.pool[2])
    tail_before[:, :, :, :5] = source.pool[1][:, :, :, :5]
    assert torch.equal(sink.pool[9], tail_before)


def test_while_a_step_waits_for_a_peer_nothing_goes_ahead_of_the_device(nodes, channel, worker):
    source, sink = nodes
    transfer, step = worker._transfer, DeviceEvent()
    of_step = BlockPush(KEY, sink.grant(source.info, [7]), (2,), (7,), (8,), step_id=5)
    written = BlockPush(KEY, sink.grant(source.info, [8]), (3,), (8,), (8,))
    awaited = source.grant(sink.info, [4], open=False)
    transfer.arrivals.expect(awaited)
    transfer.arrivals.waits(5, [ArrivingKV(awaited.grant_id, 0, time.monotonic() + PATIENCE_S)])
    transfer.submit(of_step, step)
    transfer.submit(Flush(KEY, of_step.grant))
    transfer.submit(written, waits=False)
    wait_until(lambda: channel.writes == [(((3, 8),), None)])
    step.is_done = True
    wait_until(lambda: channel.writes[1:] == [(((2, 7),), None)])
    transfer.arrivals.end(awaited.grant_id)
    assert list(worker.spoiled_slots(5)) == [0]
    transfer.submit(of_step, DeviceEvent())
    wait_until(lambda: channel.writes[2:] == [(((2, 7),), None)], "no step waits for a peer any more")


def test_behind_a_step_that_ran_as_a_whole_blocks_go_out_whole(nodes, channel, worker):
    source, sink = nodes
    grant = sink.grant(source.info, [7, 8])
    old, of_this_step = BlockPush(KEY, grant, (2,), (7,), (8,), step_id=4), BlockPush(KEY, grant, (3,), (8,), (5,), 5)
    worker.start_load_kv(StepMoves(5, (), (old, of_this_step), by_layer=False))
    wait_until(lambda: channel.writes == [(((2, 7),), None)])
    source.pool[3] = 42.0
    worker.wait_for_save()
    wait_until(lambda: channel.writes[1:] == [(((3, 8),), None)])
    wait_until(lambda: bool((sink.pool[8][:, :, :, :5] == 42.0).all()))


def test_with_other_ranks_a_layer_goes_out_when_the_next_one_has_begun(nodes, channel, worker, monkeypatch):
    monkeypatch.setattr(worker, "_lags", True)
    source, sink = nodes
    push = BlockPush(KEY, sink.grant(source.info, [9]), (1,), (9,), (8,))
    queued: list[range] = []
    monkeypatch.setattr(worker._transfer, "submit_layers", lambda push, layers, *_: queued.append(layers))
    worker.start_load_kv(StepMoves(5, (push,), ()))
    for index, name in enumerate(LAYERS):
        worker.save_kv_layer(name, source.pool[:, :, index], object())
        assert queued == ([range(2)] if index == 2 else []), "the second one's bytes are there when the third begins"
    worker.wait_for_save()
    assert queued == [range(2), range(2, 3)]
    run_step(worker, source.pool, StepMoves(6, (push,), ()), block=1, value=1.0)
    assert queued == [range(2), range(2, 3)] * 2


def test_steps_without_metadata_or_pushes_queue_nothing(nodes, channel, worker):
    source, _ = nodes
    run_step(worker, source.pool, None, block=1, value=1.0)
    run_step(worker, source.pool, StepMoves(1, (), ()), block=1, value=2.0)
    assert channel.writes == []


def test_metadata_is_bound_for_one_step_only(nodes, channel, worker):
    source, sink = nodes
    grant = sink.grant(source.info, [9])
    meta = StepMoves(1, (BlockPush(KEY, grant, (1,), (9,), (8,)),), ())
    worker.start_load_kv(meta)
    with pytest.raises(AssertionError, match="ends a step"):
        worker.start_load_kv(meta)
    worker.wait_for_save()
    run_step(worker, source.pool, None, block=1, value=1.0)
    assert channel.writes == []


def test_the_registered_pool_is_the_one_that_moves(worker):
    with pytest.raises(AssertionError):
        worker.register_kv_cache(torch.zeros(1))


class HostLoad:
    """Loads one block from a host copy on a thread of its own, last layer first, when the test says so."""

    def __init__(self, block: int, content: torch.Tensor) -> None:
        self.block, self.content, self.go = block, content, threading.Event()

    def start(self, pool: torch.Tensor) -> dict[int, threading.Event]:
        done = {layer: threading.Event() for layer in range(3)}

        def copy() -> None:
            assert self.go.wait(PATIENCE_S)
            for layer in reversed(range(3)):
                pool[self.block, :, layer] = self.content[:, layer]
                done[layer].set()

        threading.Thread(target=copy, daemon=True).start()
        return done


def test_a_layer_waits_for_its_own_load(nodes, worker):
    source, _ = nodes
    content = torch.full((2, 3, 2, 8, 4), 3.5)
    load = HostLoad(6, content)
    worker.start_load_kv(StepMoves(1, loads=(load,), is_pushed=False))
    assert not torch.equal(source.pool[6], content)
    threading.Timer(0.05, load.go.set).start()
    for name, layer in LAYERS.items():
        worker.wait_for_kv_layer(name)
        assert torch.equal(source.pool[6][:, layer], content[:, layer])
    worker.wait_for_save()
    worker.wait_for_kv_layer("model.layers.0.attn")  # nothing is left to wait for
    worker.wait_for_save()


def test_a_load_does_not_outlive_a_step_that_skips_its_layers(nodes, worker):
    source, _ = nodes
    load = HostLoad(6, torch.full((2, 3, 2, 8, 4), 4.5))
    worker.start_load_kv(StepMoves(1, loads=(load,), is_pushed=False))
    threading.Timer(0.05, load.go.set).start()
    worker.wait_for_save()
    assert torch.equal(source.pool[6], load.content)


@pytest.fixture
def late(worker, monkeypatch):
    """(worker of a device that has done no step, what it submits: (layer, event) or ("whole", waits), its events)"""
    submitted: list[tuple] = []
    events: list[DeviceEvent] = []

    def record() -> DeviceEvent:
        events.append(DeviceEvent(False))
        return events[-1]

    monkeypatch.setattr(worker, "_record_event", record)
    monkeypatch.setattr(
        worker._transfer, "submit", lambda job, written=None, waits=True: submitted.append(("whole", waits))
    )
    monkeypatch.setattr(
        worker._transfer, "submit_layers", lambda push, layers, written, *_: submitted.append((layers, *written))
    )
    return worker, submitted, events


def test_a_late_grant_is_followed_layer_by_layer_while_its_step_runs(nodes, late):
    worker, submitted, events = late
    source, sink = nodes
    push = BlockPush(KEY, sink.grant(source.info, [7]), (2,), (7,), (8,), step_id=5)
    run_step(worker, source.pool, StepMoves(5, (), ()), block=2, value=1.0)
    run_step(worker, source.pool, None, block=3, value=1.0)
    worker.push_between_steps(push)
    assert submitted == [(range(2), *events[:2]), (range(2, 3), events[2])]


def test_a_late_grant_of_a_step_that_has_run_waits_for_nothing(nodes, late):
    worker, submitted, events = late
    source, sink = nodes
    push = BlockPush(KEY, sink.grant(source.info, [7]), (2,), (7,), (8,), step_id=5)
    run_step(worker, source.pool, StepMoves(5, (), ()), block=2, value=1.0)
    for event in events:
        event.is_done = True
    worker.push_between_steps(push)
    for step in range(6, 10):
        run_step(worker, source.pool, StepMoves(step, (), ()), block=3, value=1.0)
    worker.push_between_steps(push)  # its events are forgotten by now
    unknown = BlockPush(KEY, push.grant, (2,), (7,), (8,), step_id=12)
    worker.push_between_steps(unknown)  # of a step that was not noted: after all that are launched
    assert submitted == [("whole", False), ("whole", False), ("whole", True)]
