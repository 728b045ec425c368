"""cuda_ipc against other processes: exact copies, fences by process exit, memory that comes back when a sink dies."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch
from waiting import happens, wait_until

from tandem.kernels.blocks.digest import BlockSums, block_digests
from tandem.kernels.blocks.push_blocks import push_blocks
from tandem.kernels.blocks.quantization import as_bytes
from tandem.kv_connector.layouts.geometry import pool_stride_bytes
from tandem.kv_connector.transports.base import PairSums, Write
from tandem.kv_connector.transports.mapped import cuda_ipc
from tests.fakes.kv_peer import KVPeer
from tests.fakes.kv_pools import (
    MEGABYTE_BLOCKS,
    SMALL,
    PoolNode,
    expected_after,
    grant_of,
    make_layout,
    random_write,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LAST = f"cuda:{torch.cuda.device_count() - 1}"  # another GPU where there is one
LAYOUTS = {
    "fp32": SMALL,
    "bf16-padded": make_layout(dtype="bfloat16", heads=3, head_dim=80, padding=512),
    "odd-block": make_layout(dtype="float16", heads=2, block_size=24, head_dim=128),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pushes_write_exactly_the_slots_that_they_name(layout) -> None:
    """Within one process: the target is named by its address alone."""
    source = PoolNode("p", "local", seed=1, device="cuda", layout=layout)
    sink = PoolNode("d", "local", seed=2, device="cuda", layout=layout)
    rng = random.Random(3)
    for _ in range(10):
        pairs, layers, num_valid = random_write(rng, 16, layout, range(16))
        expected = expected_after(sink.pool.float().cpu(), source.pool.float().cpu(), pairs, layers, num_valid)
        stride = sink.pool.stride(0) * sink.pool.element_size()
        push_blocks(source.pool, sink.pool.data_ptr(), stride, pairs, layers, num_valid, rng.choice([1, 16, 64]))
        assert torch.equal(sink.pool.float().cpu(), expected)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["engine", "kernel"])
@pytest.mark.parametrize("layout", [LAYOUTS["fp32"], LAYOUTS["bf16-padded"], MEGABYTE_BLOCKS], ids=str)
def test_both_ways_move_and_sum_the_same(layout, by_kernel, monkeypatch) -> None:
    """Whole blocks at once, others layer by layer, the last one partly filled; to another GPU where there is one."""
    monkeypatch.setattr(cuda_ipc, "SHORTEST_BLOCK_RUN", 1 << 40 if by_kernel else 1)
    monkeypatch.setattr(cuda_ipc, "SHORTEST_ROW", 1 << 40 if by_kernel else 1)
    source = PoolNode("p", "local", seed=1, device="cuda:0", layout=layout)
    sink = PoolNode("d", "local", seed=2, device=LAST, layout=layout)
    sink.pool[:1].copy_(source.pool[:1])  # torch lets the devices reach each other
    mapping = cuda_ipc.CudaMapping(source.pool.device, sink.pool.data_ptr(), 0, pool_stride_bytes(sink.pool))
    size, every = layout.block_size, range(layout.group.num_layers)
    pairs = [(3, 1), (0, 15), (7, 8), (5, 4), (6, 5), (11, 2)]
    sums = BlockSums.of_none(source.pool, len(pairs), 99)
    grant = sink.grant(source.info, [there for _, there in pairs], open=False)
    with torch.cuda.stream(torch.cuda.Stream(source.pool.device)):
        mapping.copy_in(source.pool, Write(grant, pairs[:2], None, [size] * 2, PairSums(sums, range(2))))
        for layer in every:
            num_valid = [size] * 3 + [size - 3]
            layers = range(layer, layer + 1)
            mapping.copy_in(source.pool, Write(grant, pairs[2:], layers, num_valid, PairSums(sums, range(2, 6))))
        mapping.flush(grant.grant_id)
        digests = sums.on_host().digests(size - 3, size)
    for here, there in pairs[:-1]:
        assert torch.equal(as_bytes(sink.pool[there].cpu()), as_bytes(source.pool[here].cpu()))
    last = pairs[-1]
    assert torch.equal(sink.pool[last[1]][..., : size - 3, :].cpu(), source.pool[last[0]][..., : size - 3, :].cpu())
    expected = block_digests(source.pool, [here for here, _ in pairs], 99, size - 3, size).cpu()
    assert torch.equal(digests.cpu(), expected)
    torch.cuda.synchronize(sink.pool.device)


@pytest.fixture
def sink():
    node = PoolNode("d", "cuda_ipc", seed=2, device="cuda:0", layout=MEGABYTE_BLOCKS)
    yield node
    node.close()


@pytest.fixture
def peer():
    process = KVPeer("peer", "cuda_ipc", seed=20, device=LAST)
    yield process
    process.kill()


def is_changing(pool: torch.Tensor) -> bool:
    before = pool.clone()
    return happens(lambda: not torch.equal(pool, before), within_s=0.5)


def test_a_source_is_served_stopped_killed_and_fenced(peer, sink) -> None:
    same = PoolNode("same", "local", layout=MEGABYTE_BLOCKS, seed=20, device="cuda:0")  # holds what the peer holds
    sink.admit(peer.info)
    peer.call("connect", sink.info)
    grant = sink.grant(peer.info, [3, 4, 5])
    before = sink.pool.clone()
    before[3], before[4][:, 2:3] = same.pool[1], same.pool[2][:, 2:3]
    before[5][:, :, :, :9] = same.pool[7][:, :, :, :9]
    peer.call("write", grant, [[1, 3]], None, [64])
    peer.call("write", grant, [[2, 4]], [2, 3], [64])
    peer.call("write", grant, [[7, 5]], None, [9])
    assert torch.equal(sink.pool, before)

    grant = sink.grant(peer.info, range(8, 16))
    peer.tell("write_for_ever", grant)
    wait_until(lambda: not torch.equal(sink.pool[15], before[15]))
    fence = sink.transports.fence(peer.info.key)
    assert is_changing(sink.pool)  # nothing stops a one-sided writer but its end
    assert not fence.done()
    peer.signal(signal.SIGKILL)
    fence.result(20)
    quiet = sink.pool.clone()
    assert not is_changing(sink.pool)
    assert torch.equal(sink.pool, quiet)
    assert torch.equal(sink.pool[:8], before[:8])


@pytest.mark.alone
def test_a_dead_sinks_memory_comes_back(peer) -> None:
    """The importer's mapping is what keeps a dead process's memory allocated; it must not outlive the process."""
    source = PoolNode("p", "cuda_ipc", seed=3, device="cuda:0", layout=MEGABYTE_BLOCKS)
    channel = source.connect(peer.info)
    grant = grant_of(peer.info, source.info, [1, 2])
    peer.call("admit", source.info)
    peer.call("open_grant", grant)
    source.pool[0] = 7.0
    channel.write(Write(grant, [(0, 1)], None, [64]))
    channel.flush(grant)
    assert peer.call("block_equals", 1, 7.0)
    free_before = torch.cuda.mem_get_info(LAST)[0]
    peer.kill()
    wait_until(lambda: channel.ended)
    wait_until(lambda: torch.cuda.mem_get_info(LAST)[0] >= free_before + source.pool.nbytes)
    source.close()


def test_a_stopped_sink_stalls_nobody(peer) -> None:
    source = PoolNode("p", "cuda_ipc", seed=3, device="cuda:0", layout=MEGABYTE_BLOCKS)
    channel = source.connect(peer.info)
    grant = grant_of(peer.info, source.info, [1, 2])
    peer.call("admit", source.info)
    peer.call("open_grant", grant)
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    channel.write(Write(grant, [(0, 1)], None, [64]))
    channel.flush(grant)
    assert time.monotonic() - started < 2.0
    peer.signal(signal.SIGCONT)
    source.close()
