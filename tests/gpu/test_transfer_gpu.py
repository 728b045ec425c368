"""Transfers between CUDA pools (and CPU pools) of one process, and the order between compute and push streams."""

from __future__ import annotations

import random
import time

import pytest
import torch
from waiting import wait_until

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import LayerPlace
from tandem.kv_connector.protocol.jobs import (
    ArrivingKV,
    BlockPush,
    Finalize,
    ReadySent,
    StepMoves,
    Verified,
    Verify,
)
from tandem.kv_connector.transfer.layer_hooks import ConnectorWorker
from tandem.kv_connector.transfer.thread import TransferWorker
from tandem.kv_connector.transports.base import Write
from tests.fakes.kv_pools import MEGABYTE_BLOCKS, SMALL, PoolNode, expected_after, make_layout, random_write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KEY = AttemptKey("r", 0)


@pytest.fixture
def make_pair():
    nodes = []

    def make(transport: str, source_device: str, sink_device: str, **kwargs) -> tuple[PoolNode, PoolNode]:
        source = PoolNode("p", transport, seed=1, device=source_device, **kwargs)
        sink = PoolNode("d", transport, seed=2, device=sink_device, **kwargs)
        nodes.extend((source, sink))
        sink.admit(source.info)
        return source, sink

    yield make
    for node in nodes:
        node.close()


@pytest.mark.parametrize("layout", [SMALL, make_layout(dtype="bfloat16", heads=3, padding=512)], ids=["plain", "bf16"])
@pytest.mark.parametrize(
    ("transport", "source_device", "sink_device"),
    [("tcp", "cuda", "cuda"), ("tcp", "cuda", "cpu"), ("tcp", "cpu", "cuda"), ("local", "cuda", "cuda")],
)
def test_random_writes_arrive_exactly(make_pair, transport, source_device, sink_device, layout):
    source, sink = make_pair(transport, source_device, sink_device, layout=layout)
    channel = source.connect(sink.info)
    rng = random.Random(5)
    for _ in range(12):
        granted = rng.sample(range(16), 6)
        grant = sink.grant(source.info, granted)
        pairs, layers, num_valid = random_write(rng, 16, layout, granted)
        expected = expected_after(sink.pool.float().cpu(), source.pool.float().cpu(), pairs, layers, num_valid)
        channel.write(Write(grant, pairs, layers, num_valid))
        channel.flush(grant)
        torch.testing.assert_close(sink.pool.float().cpu(), expected, rtol=0, atol=0)
        sink.transports.close_grant(grant.grant_id)


def make_worker(node: PoolNode, sink: PoolNode, events: list) -> TransferWorker:
    transfer = TransferWorker(
        node.pool,
        node.layout,
        node.info.key,
        lambda peer, on_lost: node.transports.connect(node.info, peer, on_lost),
        events.append,
        lambda to, message: None,
        lambda *what: None,
    )
    transfer.start()
    transfer.connect_peer(sink.info)
    return transfer


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_pushes_wait_for_the_layer_that_the_device_has_not_computed_yet(make_pair, transport):
    """The compute stream is kept busy, so that a push which does not wait sends old bytes."""
    source, sink = make_pair(transport, "cuda", "cuda", layout=MEGABYTE_BLOCKS)
    events: list = []
    transfer = make_worker(source, sink, events)
    worker = ConnectorWorker(transfer, {str(layer): LayerPlace(0, layer) for layer in range(8)})
    worker.register_kv_cache(source.pool)
    grant = sink.grant(source.info, [9, 7, 5])
    new = BlockPush(KEY, grant, (1, 2), (9, 7), (64, 30))
    whole = BlockPush(KEY, grant, (3,), (5,), (64,), step_id=0)
    busy = torch.randn(4096, 4096, device="cuda")

    def compute(block: int, layer: int, value: float) -> None:
        busy.copy_(busy @ busy / 4096)
        source.pool[block, :, layer] = value

    compute(3, 0, 30.0)
    worker.wait_for_save()
    worker.start_load_kv(StepMoves(1, (new,), (whole,)))
    for layer in range(8):
        for block in (1, 2):
            compute(block, layer, 10.0 * block + layer)
        worker.save_kv_layer(str(layer), source.pool[:, :, layer], object())
    worker.wait_for_save()
    transfer.submit(Finalize(KEY, grant, 0, (1, 2, 3), 64, 7, ()))
    wait_until(lambda: any(isinstance(event, ReadySent) for event in events), "ReadySent")
    torch.cuda.synchronize()
    for layer in range(8):
        assert bool((sink.pool[9, :, layer] == 10.0 + layer).all())
        assert bool((sink.pool[7, :, layer, :, :30] == 20.0 + layer).all())
    assert torch.equal(sink.pool[5].cpu(), source.pool[3].cpu())
    ready = events[-1].ready
    transfer.submit(Verify(KEY, grant.grant_id, 0, (1, 2, 3), ready.digests, 7, 64))
    wait_until(lambda: isinstance(events[-1], Verified), "Verified")
    assert events[-1].bad_indices == ()
    assert transfer.stop(5.0)


def test_what_is_written_passes_pushes_of_a_step_that_waits_for_a_peer(make_pair):
    """The peer may wait for it: if it came behind a push of that step, neither would ever run."""
    source, sink = make_pair("local", "cuda", "cuda", layout=MEGABYTE_BLOCKS)
    events: list = []
    transfer = make_worker(source, sink, events)
    worker = ConnectorWorker(transfer, {str(layer): LayerPlace(0, layer) for layer in range(8)})
    worker.register_kv_cache(source.pool)
    awaited, earlier = source.grant(sink.info, [2], open=False), AttemptKey("earlier", 0)
    of_step, of_earlier = (sink.grant(source.info, [block]) for block in (9, 5))
    transfer.arrivals.expect(awaited)
    arriving = ArrivingKV(awaited.grant_id, 0, time.monotonic() + 60.0)
    worker.start_load_kv(StepMoves(1, (BlockPush(KEY, of_step, (1,), (9,), (64,), 1),), (), (), (arriving,)))
    source.pool[1, :, 0] = 10.0  # loads the kernel: no stream waits yet
    for layer in range(8):
        worker.wait_for_kv_layer(str(layer))
        source.pool[1, :, layer] = 10.0 + layer
        worker.save_kv_layer(str(layer), source.pool[:, :, layer], object())
    worker.wait_for_save()
    try:
        transfer.submit(BlockPush(earlier, of_earlier, (3,), (5,), (64,)), waits=False)
        transfer.submit(Finalize(earlier, of_earlier, 0, (3,), 64, 7, ()))
        wait_until(lambda: any(isinstance(event, ReadySent) for event in events), "the end of the earlier hand-off")
        assert not torch.cuda.current_stream().query(), "the step waits"
    finally:
        transfer.arrivals.end(awaited.grant_id)
    transfer.submit(Finalize(KEY, of_step, 0, (1,), 64, 7, ()))
    wait_until(lambda: sum(isinstance(event, ReadySent) for event in events) == 2, "the end of the step's own")
    torch.cuda.synchronize()
    assert all(bool((sink.pool[9, :, layer] == 10.0 + layer).all()) for layer in range(8))
    assert torch.equal(sink.pool[5].cpu(), source.pool[3].cpu())
    assert transfer.stop(5.0)
