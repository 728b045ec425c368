"""Transports against other processes that are killed and stopped: what a fence and a mapping's end may promise."""

from __future__ import annotations

import errno
import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S, happens, wait_until

from tandem.engine.contracts.errors import GrantError, PeerLostError, TransportError
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.links.nixl_agent import nixl_problem
from tandem.kv_connector.transports.links.ucx import ucx_problem
from tandem.kv_connector.transports.mapped.processes import ProcessRef, host_id, process_watcher
from tests.fakes.kv_peer import KVPeer
from tests.fakes.kv_pools import MEGABYTE_BLOCKS, PoolNode, connected, grant_of, needs

UCX = pytest.param("ucx", marks=[needs("ucx"), pytest.mark.slow])  # two more processes that import torch
TRANSPORTS = ["shm", pytest.param("nixl", marks=needs("nixl")), UCX, "tcp"]
PROBLEMS = {"shm": "", "nixl": nixl_problem(), "ucx": ucx_problem(), "tcp": ""}


@pytest.fixture(scope="module")
def peers(request):
    """A process a transport, and one more for shm; started together because each takes a while to import torch."""
    asked = {item.callspec.params.get("transport") for item in request.session.items if hasattr(item, "callspec")}
    spares = {
        name: [KVPeer(f"peer-{name}-{i}", name, seed=20 + i) for i in range(1 + (name == "shm"))]
        for name, problem in PROBLEMS.items()
        if not problem and (name != "ucx" or name in asked)
    }
    yield spares
    for peer in itertools.chain(*spares.values()):
        peer.kill()


def is_changing(pool: torch.Tensor, within_s: float = 0.3) -> bool:
    before = pool.clone()
    return happens(lambda: not torch.equal(pool, before), within_s=within_s)


def pool_inodes() -> set[str]:
    """Of the KV pools mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:tandem-kv-pool" in line}


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_a_stopped_sink_is_an_error_within_the_timeout(peers, make_node, transport):
    peer = peers[transport][0]
    source = make_node("p", transport, timeout_s=0.5, seed=20, layout=MEGABYTE_BLOCKS)  # writes what the peer holds
    channel = connected(source, peer.info)
    grant = sink_grant(peer, source, range(16))
    everything = [(block, block) for block in range(16)]
    peer.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(TransportError, match="no progress in time"):
            write_until_it_fails(channel, grant, everything)
        assert time.monotonic() - started > 0.4
        assert len(source.lost) == 1
        with pytest.raises(PeerLostError):
            channel.write(Write(grant, everything[:1], None, [64]))
        with pytest.raises(TransportError):
            source.connect(peer.info)  # the kernel takes the connection, nobody answers
    finally:
        peer.signal(signal.SIGCONT)  # the next test asks it for more


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_is_served_stopped_killed_and_fenced(peers, make_node, transport):
    peer = peers[transport][0]
    sink = make_node("d", transport, seed=2, layout=MEGABYTE_BLOCKS)
    same = PoolNode("same", "local", layout=MEGABYTE_BLOCKS, seed=20)  # holds what the peer holds
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
    assert is_changing(sink.pool, PATIENCE_S)
    if transport in ("tcp", "ucx"):  # the receiver writes: neither the gate nor the fence waits for the source's end
        peer.signal(signal.SIGSTOP)
        sink.transports.close_grant(grant.grant_id)
        quiet = sink.pool.clone()
        peer.signal(signal.SIGCONT)
        time.sleep(0.1)
        assert torch.equal(sink.pool, quiet)
        peer.signal(signal.SIGSTOP)
        sink.transports.fence(peer.info.key).result(PATIENCE_S)
    elif transport == "nixl":  # the source writes, but through an agent of the sink's, which ends here
        sink.transports.close_grant(grant.grant_id)
        assert is_changing(sink.pool, PATIENCE_S)
        peer.signal(signal.SIGSTOP)  # with bytes of it in the sockets' buffers
        sink.transports.fence(peer.info.key).result(PATIENCE_S)
        quiet = sink.pool.clone()
        peer.signal(signal.SIGCONT)
        assert not is_changing(sink.pool)
        assert torch.equal(sink.pool, quiet)
    else:
        fence = sink.transports.fence(peer.info.key)
        assert is_changing(sink.pool, PATIENCE_S)  # nothing stops a one-sided writer but its end
        peer.signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert not fence.done()  # a stopped process may go on
        peer.signal(signal.SIGCONT)
        assert is_changing(sink.pool, PATIENCE_S)
        peer.signal(signal.SIGKILL)
        fence.result(PATIENCE_S)
        assert peer.process.wait(PATIENCE_S) == -signal.SIGKILL
    quiet = sink.pool.clone()
    assert not is_changing(sink.pool)
    assert torch.equal(sink.pool, quiet)
    assert torch.equal(sink.pool[:8], before[:8])
    with pytest.raises(GrantError):
        sink.grant(peer.info, [1])
    peer.kill()


def test_a_dead_peers_memory_is_unmapped_and_its_fence_is_done_at_once(peers, make_node):
    """As a sink of one node and as a source of another."""
    peer = peers["shm"][1]
    sink = make_node("d", "shm", layout=MEGABYTE_BLOCKS)
    sink.admit(peer.info)
    source = make_node("p", "shm", seed=3, layout=MEGABYTE_BLOCKS)
    before = pool_inodes()
    channel = source.connect(peer.info)
    grant = sink_grant(peer, source, [1, 2])
    source.pool[0] = 7.0
    channel.write(Write(grant, [(0, 1)], None, [64]))
    channel.flush(grant)
    assert peer.call("block_equals", 1, 7.0)
    peers_pool = pool_inodes() - before
    assert len(peers_pool) == 1
    failures = []

    def keep_writing() -> None:
        try:
            write_until_it_fails(channel, grant, [(0, 1), (0, 2)])
        except TransportError as error:
            failures.append(error)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    peer.kill()
    writer.join(PATIENCE_S)
    assert isinstance(failures[0], PeerLostError)
    wait_until(lambda: source.lost == [(peer.info.key, "its process exited")])
    wait_until(lambda: not peers_pool & pool_inodes())
    with pytest.raises(PeerLostError):
        channel.flush(grant)
    with pytest.raises(PeerLostError):
        source.connect(peer.info)
    sink.transports.fence(peer.info.key).result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        sink.admit(peer.info)


def write_until_it_fails(channel, grant, pairs) -> None:
    while True:
        channel.write(Write(grant, pairs, None, [64] * len(pairs)))


def sink_grant(peer: KVPeer, source: PoolNode, block_ids):
    """A grant made here in the peer's name and opened there."""
    peer.call("admit", source.info)
    grant = grant_of(peer.info, source.info, block_ids)
    peer.call("open_grant", grant)
    return grant


def test_who_cannot_be_watched_for_want_of_descriptors_does_not_count_as_gone():
    """Else its fence would be done while it can still write."""
    code = """
import errno
import os, resource
from tandem.engine.contracts.errors import PeerLostError
from tandem.kv_connector.transports.mapped.processes import ProcessRef, process_watcher
process_watcher()
me = ProcessRef.current()
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
try:
    me.open_pidfd()
except PeerLostError as error:
    print("gone:", error)
except OSError as error:
    print("errno", error.errno)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=True
    ).stdout
    assert out.strip() == f"errno {errno.EMFILE}"


def test_watches_end_when_nobody_needs_them():
    watcher = process_watcher()
    num_before = watcher.num_watches
    watch = watcher.watch(ProcessRef.current(), on_exit=lambda: pytest.fail("we are alive"))
    assert watcher.num_watches == num_before + 1
    watcher.unwatch(watch)
    watcher.unwatch(watch)
    assert watcher.num_watches == num_before
    assert watch.exited.cancelled()


def test_host_id_names_kernel_and_pid_namespace():
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_id().startswith(boot_id)
    assert "pid:[" in host_id()
