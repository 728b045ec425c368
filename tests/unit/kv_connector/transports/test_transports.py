"""Transports between nodes of this process: real memory, real sockets. Across processes: test_transports_processes."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from tandem.engine.contracts.errors import ConfigError, TransportError
from tandem.kernels.blocks.digest import block_digests
from tandem.kv_connector.layouts.geometry import BlockGeometry, byte_view
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tests.fakes.kv_pools import (
    ALL,
    MEGABYTE_BLOCKS,
    SMALL,
    PoolNode,
    expected_after,
    make_layout,
    random_write,
)

# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize(
    "layout",
    [SMALL, make_layout(dtype="bfloat16", heads=3, padding=512), make_layout(dtype="float8_e4m3fn", heads=1, layers=1)],
    ids=["plain", "padded-bf16", "fp8-one-layer"],
)
def test_random_writes_arrive_exactly_and_touch_nothing_else(make_pair, transport, layout):
    source, sink, channel = make_pair(transport, layout=layout)
    rng = random.Random(5)
    for _ in range(12):
        granted = rng.sample(range(16), 6)
        grant = sink.grant(source.info, granted)
        pairs, layers, num_valid = random_write(rng, 16, layout, granted)
        expected = expected_after(sink.pool.float(), source.pool.float(), pairs, layers, num_valid)
        channel.write(Write(grant, pairs, layers, num_valid))
        channel.flush(grant)
        torch.testing.assert_close(sink.pool.float(), expected, rtol=0, atol=0)
        sink.transports.close_grant(grant.grant_id)


def test_wire_order_is_c_order_of_the_valid_part():
    layout = make_layout(padding=64)
    node_pool = torch.arange(2 * layout.stride_bytes // 4, dtype=torch.float32).view(2, -1)
    pool = node_pool[:, : layout.payload_bytes // 4].unflatten(1, (2, 3, 2, 8, 4))
    geometry, memory = BlockGeometry(layout), byte_view(pool)
    for layers, valid in [(range(3), 8), (range(1, 2), 8), (range(1, 3), 8), (range(3), 5), (range(2, 3), 1)]:
        wire = b"".join(memory[start : start + length] for start, length in geometry.runs(1, layers, valid))
        assert wire == pool[1, :, layers.start : layers.stop, :, :valid].contiguous().numpy().tobytes()
        assert len(wire) == geometry.payload_bytes(len(layers), valid)


def test_blocks_beyond_one_frame_and_one_sendmsg(make_pair):
    source, sink, channel = make_pair("tcp", layout=MEGABYTE_BLOCKS, num_blocks=24)
    grant = sink.grant(source.info, range(24))
    pairs = [(23 - block, block) for block in range(24)]
    num_valid = [64] * 23 + [63]  # 23 contiguous runs, then 512 short ones
    before = sink.pool[23].clone()
    channel.write(Write(grant, pairs, None, num_valid))
    channel.flush(grant)
    assert torch.equal(sink.pool[:23], source.pool.flip(0)[:23])
    assert torch.equal(sink.pool[23, :, :, :, :63], source.pool[0, :, :, :, :63])
    assert torch.equal(sink.pool[23, :, :, :, 63:], before[:, :, :, 63:])


# --- many at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ALL)
def test_many_sources_and_grants_at_once(make_node, transport):
    """Three sources push layer by layer under many grants; some close early. Open ones are exact, others in bounds."""
    sink = make_node("d", transport, num_blocks=64)
    sources = [make_node(f"p{i}", transport, seed=10 + i) for i in range(3)]
    untouched = sink.pool.clone()
    failures, used, lock = [], set(), threading.Lock()
    free = list(range(60))

    def hand_off(source: PoolNode, channel, rng: random.Random) -> None:
        with lock:
            blocks = [free.pop() for _ in range(5)]
            used.update(blocks)
        grant = sink.grant(source.info, blocks)
        pairs = [(rng.randrange(16), block) for block in blocks]
        cancelled = rng.random() < 0.3
        try:
            for layer in range(3):
                channel.write(Write(grant, pairs, range(layer, layer + 1), [8, 8, 8, 8, 3]))
                if cancelled and layer == 1:
                    sink.transports.close_grant(grant.grant_id)
            channel.flush(grant)
        except TransportError:
            if not cancelled:
                failures.append("an open grant was refused")
            return
        for (origin, block), valid in zip(pairs, [8, 8, 8, 8, 3], strict=True):
            if not torch.equal(sink.pool[block, :, :, :, :valid], source.pool[origin, :, :, :, :valid]):
                failures.append(f"block {block} differs")

    def run(source: PoolNode, seed: int) -> None:
        rng = random.Random(seed)
        sink.admit(source.info)
        channel = source.connect(sink.info)
        for _ in range(4):
            hand_off(source, channel, rng)

    threads = [threading.Thread(target=run, args=(source, seed)) for seed, source in enumerate(sources)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(used) == 60
    assert torch.equal(sink.pool[60:], untouched[60:])


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize(("faults", "bad"), [("corrupt:2", [1]), ("drop:3", [2]), ("duplicate:1,delay:0.001", [])])
def test_digests_find_injected_faults(make_pair, transport, faults, bad):
    source, sink, channel = make_pair(transport)
    channel = FaultInjector(channel, parse_faults(faults))
    grant = sink.grant(source.info, [9, 8, 7])
    for index, block in enumerate(grant.block_ids):
        channel.write(Write(grant, [(index, block)], None, [8]))
    channel.flush(grant)
    sent = block_digests(source.pool, [0, 1, 2], 77, 8, 8)
    received = block_digests(sink.pool, [9, 8, 7], 77, 8, 8)
    assert [i for i in range(3) if sent[i] != received[i]] == bad


def test_a_fault_can_hit_every_write(make_pair):
    source, sink, channel = make_pair("local")
    channel = FaultInjector(channel, parse_faults("corrupt:*"))
    grant = sink.grant(source.info, [1, 2])
    for block in (1, 2):
        channel.write(Write(grant, [(0, block)], range(2, 3), [1]))
        difference = sink.pool[block, :, 2, :, :1] != source.pool[0, :, 2, :, :1]
        assert int(difference.sum()) == 1


def test_a_fault_strikes_the_write_that_it_names(make_pair, monkeypatch):
    """What arrives does not tell a write that is done twice from one that is done once."""
    source, sink, channel = make_pair("local")
    written: list[int] = []
    copy = channel._copy
    monkeypatch.setattr(channel, "_copy", lambda *args: (written.append(args[1].pairs[0][1]), copy(*args)))
    faulty = FaultInjector(channel, parse_faults("duplicate:2,drop:3"))
    grant = sink.grant(source.info, [1, 2, 3, 4])
    for block in grant.block_ids:
        faulty.write(Write(grant, [(0, block)], None, [8]))
    assert written == [1, 2, 2, 4]


@pytest.mark.parametrize("text", ["corupt:1", "corrupt", "delay:soon", "die:first"])
def test_faults_that_are_not_understood_are_named(text):
    with pytest.raises(ConfigError, match=text.split(":", maxsplit=1)[0]):
        parse_faults(text)
