"""Transports between nodes of this process: real memory, real sockets. Across processes: test_transports_processes."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from tandem.engine.errors import ConfigError, GrantError, PeerLostError, TransportError
from tandem.engine.messages import KVGrant
from tandem.engine.security import ClusterKeys
from tandem.kernels.digest import block_digests
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tandem.kv_connector.transports.geometry import BlockGeometry, byte_view
from tandem.kv_connector.transports.grants import GrantTable
from tandem.kv_connector.transports.link_transport import LinkExport
from tandem.kv_connector.transports.mapped import MappedExport
from tandem.kv_connector.transports.selection import candidates, choose_transport
from tandem.kv_connector.transports.shm import ShmHandle
from tandem.kv_connector.transports.tcp_channel import dial
from tandem.kv_connector.transports.tcp_wire import WriteFrame, send_frame, send_views
from tests.fakes.kv_pools import (
    KEYS,
    MEGABYTE_BLOCKS,
    SMALL,
    PoolNode,
    expected_after,
    make_layout,
    needs,
    random_write,
    wait_until,
)

NIXL = pytest.param("nixl", marks=needs("nixl"))
UCX = pytest.param("ucx", marks=needs("ucx"))
ALL = ["local", "shm", NIXL, UCX, "tcp"]
# What these ask of a sink's gate, NIXL fulfils for blocks that travel packed, which these small ones do.
RECEIVER_WRITES = ["local", NIXL, UCX, "tcp"]


@pytest.fixture
def make_node():
    nodes = []

    def make(*args, **kwargs) -> PoolNode:
        nodes.append(PoolNode(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def make_pair(make_node):
    def make(transport: str, **kwargs):
        source, sink = make_node("p", transport, seed=1, **kwargs), make_node("d", transport, seed=2, **kwargs)
        sink.admit(source.info)
        return source, sink, source.connect(sink.info)

    return make


def full(sink: PoolNode, pairs) -> list[int]:
    return [sink.layout.block_size] * len(pairs)


# --- bytes ----------------------------------------------------------------------------------------------------


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
        channel.write(grant, pairs, layers, num_valid)
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
    channel.write(grant, pairs, None, num_valid)
    channel.flush(grant)
    assert torch.equal(sink.pool[:23], source.pool.flip(0)[:23])
    assert torch.equal(sink.pool[23, :, :, :, :63], source.pool[0, :, :, :, :63])
    assert torch.equal(sink.pool[23, :, :, :, 63:], before[:, :, :, 63:])


# --- grants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ALL)
def test_the_source_refuses_blocks_outside_the_grant_and_other_epochs(make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [3, 4])
    before = sink.pool.clone()
    with pytest.raises(GrantError, match="block 5"):
        channel.write(grant, [(0, 3), (1, 5)], None, [8, 8])
    with pytest.raises(GrantError, match="epoch"):
        channel.write(msgspec.structs.replace(grant, sink_epoch=1), [(0, 3)], None, [8])
    channel.flush(grant)
    assert torch.equal(sink.pool, before)


def refused(channel, grant: KVGrant, pairs) -> str:
    """The reason that a write gets, at the write or at the flush."""
    try:
        channel.write(grant, pairs, None, [8] * len(pairs))
        channel.flush(grant)
    except TransportError as error:
        return error.message
    pytest.fail("the write was taken")


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_the_receiver_refuses_foreign_forged_closed_and_replayed_grants(make_node, make_pair, transport):
    source, sink, channel = make_pair(transport)
    other = make_node("p2", transport, seed=3)
    sink.admit(other.info)
    grant = sink.grant(source.info, [3, 4])
    before = sink.pool.clone()
    assert "was given to p" in refused(other.connect(sink.info), grant, [(0, 3)])
    widened = msgspec.structs.replace(grant, block_ids=(3, 4, 5))
    assert "does not cover blocks [5]" in refused(channel, widened, [(0, 5)])
    assert "is not open" in refused(channel, sink.grant(source.info, [7], open=False), [(0, 7)])
    assert torch.equal(sink.pool, before)
    sink.transports.close_grant(grant.grant_id)
    assert "is not open" in refused(channel, grant, [(0, 3)])
    assert torch.equal(sink.pool, before)
    assert sink.by_name[transport].grants.num_refused == 4
    again = sink.grant(source.info, [3])  # the channel survives refusals
    channel.write(again, [(6, 3)], None, [8])
    channel.flush(again)
    assert torch.equal(sink.pool[3], source.pool[6])
    sink.by_name[transport].grants.check_integrity()


def test_grants_need_an_admitted_source(make_node):
    sink, source = make_node("d", "shm"), make_node("p", "shm")
    with pytest.raises(GrantError, match="not admitted"):
        sink.grant(source.info, [1])


def test_closing_a_grant_waits_for_its_writer_only():
    table = GrantTable()
    grants = [
        KVGrant(
            request_id="r", attempt=0, grant_id=i, source_id="p", source_epoch=1, sink_id="d", sink_epoch=2,
            first_block=0, block_ids=(i,), num_prompt_tokens=8, lease_s=1.0,
        )
        for i in (1, 2)
    ]  # fmt: skip
    for grant in grants:
        table.open(grant)
    inside, woken, leave, closed = (threading.Event() for _ in range(4))

    def writer():
        with table.writing(1, ("p", 1), [1], woken.set):
            inside.set()
            leave.wait(5)
            assert not closed.is_set()

    def closer():
        table.close(1)
        closed.set()

    threads = [threading.Thread(target=writer)]
    threads[0].start()
    assert inside.wait(5)
    table.close(2)  # returns: nobody writes under it
    threads.append(threading.Thread(target=closer))
    threads[1].start()
    assert woken.wait(5)
    assert not closed.wait(0.05)
    leave.set()
    assert closed.wait(5)
    with pytest.raises(GrantError), table.writing(1, ("p", 1), [1]):
        pass
    for thread in threads:
        thread.join()
    table.check_integrity()


def raw_connection(source: PoolNode, sink: PoolNode):
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    me, peer = (source.info.node_id, source.epoch), (sink.info.node_id, sink.epoch)
    return dial(("127.0.0.1", port), me, peer, KEYS.derive("tcp"), 2.0)


def test_closing_a_grant_does_not_wait_for_a_stalled_source(make_pair):
    source, sink, _ = make_pair("tcp", layout=MEGABYTE_BLOCKS, timeout_s=30.0)
    grant = sink.grant(source.info, [0, 1])
    payload = byte_view(source.pool)[: 2 << 20]
    with raw_connection(source, sink) as sock:
        send_frame(sock, WriteFrame(grant.grant_id, (0, 1), 0, 8, (64, 64)), [payload[: 1 << 19]])
        written = source.pool[0].view(-1)[: 1 << 17]
        assert wait_until(lambda: torch.equal(sink.pool[0].view(-1)[: 1 << 17], written))
        started = time.monotonic()
        sink.transports.close_grant(grant.grant_id)
        assert time.monotonic() - started < 1.0
        before = sink.pool.clone()
        send_views(sock, [payload[1 << 19 :]])  # late bytes of the closed grant: read and thrown away
        later = sink.grant(source.info, [5])
        send_frame(sock, WriteFrame(later.grant_id, (5,), 0, 8, (64,)), [payload[: 1 << 20]])
        assert wait_until(lambda: torch.equal(sink.pool[5], source.pool[0]))
    before[5] = source.pool[0]
    assert torch.equal(sink.pool, before)
    assert sink.by_name["tcp"].grants.num_refused == 1


@pytest.mark.parametrize(
    "frame",
    [
        WriteFrame(1, (0,), 0, 4, (8,)),
        WriteFrame(1, (0,), -1, 1, (8,)),
        WriteFrame(1, (0,), 0, 0, (8,)),
        WriteFrame(1, (0,), 0, 1, (9,)),
        WriteFrame(1, (0,), 0, 1, (0,)),
        WriteFrame(1, (0, 1), 0, 1, (8,)),
        WriteFrame(1, (0,) * 6000, 0, 3, (8,) * 6000),
    ],
)
def test_a_frame_that_makes_no_sense_ends_its_connection(make_pair, frame):
    source, sink, _ = make_pair("tcp")
    with raw_connection(source, sink) as sock:
        send_frame(sock, frame)
        assert hangs_up(sock)


# --- who may connect ----------------------------------------------------------------------------------------


def test_tcp_refuses_strangers_and_other_epochs(make_node, make_pair):
    source, sink, _ = make_pair("tcp")
    stranger = make_node("x", "tcp", keys=ClusterKeys(b"another secret!!", curve=False))
    with pytest.raises(TransportError):
        stranger.connect(sink.info)
    with pytest.raises(PeerLostError, match="this is d"):
        source.connect(msgspec.structs.replace(sink.info, epoch=7))
    with raw_socket(sink) as sock:
        sock.recv(16)
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert hangs_up(sock)


def raw_socket(sink: PoolNode) -> socket.socket:
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    return socket.create_connection(("127.0.0.1", port), 3)


def hangs_up(sock: socket.socket) -> bool:
    """Whether the other side closes, politely or by a reset."""
    sock.settimeout(3)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_tcp_takes_the_control_host_for_a_wildcard(make_pair):
    source, sink, _ = make_pair("tcp")
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    exports = {"tcp": msgspec.msgpack.encode(LinkExport("0.0.0.0", port))}
    info = msgspec.structs.replace(sink.info, transports=exports, control_address="tcp://127.0.0.1:5555")
    source.connect(info)
    with pytest.raises(PeerLostError, match="control address"):
        source.connect(msgspec.structs.replace(info, control_address=""))


def altered_export(info, **changes):
    export = msgspec.structs.replace(msgspec.msgpack.decode(info.transports["shm"], type=MappedExport), **changes)
    return msgspec.structs.replace(info, transports={"shm": msgspec.msgpack.encode(export)})


def test_shm_maps_nothing_but_the_pool_that_was_exported(make_node, make_pair):
    source, sink, _ = make_pair("shm")
    export = msgspec.msgpack.decode(sink.info.transports["shm"], type=MappedExport)
    with pytest.raises(PeerLostError, match="pid belongs to another"):
        source.connect(altered_export(sink.info, start_time=export.start_time + 1))
    with pytest.raises(PeerLostError, match="is gone"):
        source.connect(altered_export(sink.info, pid=2**22 - 3))
    other = make_node("d2", "shm")
    other_export = msgspec.msgpack.decode(other.info.transports["shm"], type=MappedExport)
    handle = msgspec.msgpack.decode(export.handle, type=ShmHandle)
    other_fd = msgspec.msgpack.decode(other_export.handle, type=ShmHandle).fd
    for wrong in (msgspec.structs.replace(handle, fd=0), msgspec.structs.replace(handle, fd=other_fd)):
        with pytest.raises(TransportError, match="is not"):
            source.connect(altered_export(sink.info, handle=msgspec.msgpack.encode(wrong)))
    with pytest.raises(TransportError, match="no pool"):
        source.connect(altered_export(sink.info, handle=b"garbage"))
    with pytest.raises(TransportError, match="fewer bytes"):
        source.connect(altered_export(sink.info, num_blocks=10_000))
    with pytest.raises(TransportError, match="one host"):
        source.connect(msgspec.structs.replace(sink.info, host_id="elsewhere"))


# --- ends ---------------------------------------------------------------------------------------------------


def num_pool_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:tandem-kv-pool")


@pytest.mark.parametrize("transport", ALL)
def test_a_newer_epoch_supersedes_the_channel(make_node, make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [1])
    gc.collect()  # what other tests left mapped must not go away in between
    mapped = num_pool_mappings()
    newer = make_node("d", transport)
    newer.admit(source.info)
    source.connect(newer.info)
    if transport == "shm":  # the old pool's mapping made room for the new one's; one more is the new sink's own
        assert num_pool_mappings() == mapped + 1
    with pytest.raises(PeerLostError):
        channel.write(grant, [(0, 1)], None, [8])
    channel.close()


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_a_fenced_epoch_is_barred_and_its_successor_is_not(make_node, make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [1])
    before = sink.pool.clone()
    sink.transports.fence(source.info.node_id, source.epoch).result(5)
    assert refused(channel, grant, [(0, 1)])
    with pytest.raises(GrantError):
        sink.grant(source.info, [1])
    assert torch.equal(sink.pool, before)
    if transport != "local":
        assert wait_until(lambda: len(source.lost) == 1)
        with pytest.raises(PeerLostError, match="fenced"):
            source.connect(sink.info)
    reborn = make_node("p", transport, seed=9)
    sink.admit(reborn.info)
    grant = sink.grant(reborn.info, [1])
    new_channel = reborn.connect(sink.info)
    new_channel.write(grant, [(0, 1)], None, [8])
    new_channel.flush(grant)
    assert torch.equal(sink.pool[1], reborn.pool[0])


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_a_fenced_epoch_that_lives_is_served_again_once_admitted(make_pair, transport):
    """A source that was only silent for a while: its old grants stay closed, new ones work."""
    source, sink, _ = make_pair(transport)
    old = sink.grant(source.info, [1])
    before = sink.pool.clone()
    fence = sink.transports.fence(source.info.node_id, source.epoch)
    sink.admit(source.info)
    channel = source.connect(sink.info)
    fence.result(5)  # it waits for connections from before, not for the new one
    assert refused(channel, old, [(0, 1)])
    assert torch.equal(sink.pool, before)
    new = sink.grant(source.info, [2])
    channel.write(new, [(3, 2)], None, [8])
    channel.flush(new)
    assert torch.equal(sink.pool[2], source.pool[3])


@pytest.mark.parametrize("transport", ALL)
def test_writes_and_flushes_after_close_fail(make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [1])
    channel.close()
    channel.close()
    with pytest.raises(PeerLostError, match="closed here"):
        channel.write(grant, [(0, 1)], None, [8])
    with pytest.raises(PeerLostError):
        channel.flush(grant)
    assert source.lost == []


def test_closing_a_node_ends_its_threads(make_pair):
    _, sink, _ = make_pair("tcp")
    assert wait_until(lambda: any(thread.name == "kv-tcp-receiver" for thread in threading.enumerate()))
    sink.close()
    assert not any(thread.name == "kv-tcp-receiver" for thread in threading.enumerate())


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
                channel.write(grant, pairs, range(layer, layer + 1), [8, 8, 8, 8, 3])
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
        thread.join(20)
    assert failures == []
    assert len(used) == 60
    assert torch.equal(sink.pool[60:], untouched[60:])


# --- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize(("faults", "bad"), [("corrupt:2", [1]), ("drop:3", [2]), ("duplicate:1,delay:0.001", [])])
def test_digests_find_injected_faults(make_pair, transport, faults, bad):
    source, sink, channel = make_pair(transport)
    channel = FaultInjector(channel, parse_faults(faults))
    grant = sink.grant(source.info, [9, 8, 7])
    for index, block in enumerate(grant.block_ids):
        channel.write(grant, [(index, block)], None, [8])
    channel.flush(grant)
    sent = block_digests(source.pool, [0, 1, 2], 77, 8, 8)
    received = block_digests(sink.pool, [9, 8, 7], 77, 8, 8)
    assert [i for i in range(3) if sent[i] != received[i]] == bad


def test_a_fault_can_hit_every_write(make_pair):
    source, sink, channel = make_pair("local")
    channel = FaultInjector(channel, parse_faults("corrupt:*"))
    grant = sink.grant(source.info, [1, 2])
    for block in (1, 2):
        channel.write(grant, [(0, block)], range(2, 3), [1])
        difference = sink.pool[block, :, 2, :, :1] != source.pool[0, :, 2, :, :1]
        assert int(difference.sum()) == 1


@pytest.mark.parametrize("text", ["corupt:1", "corrupt", "delay:soon", "die:first"])
def test_faults_that_are_not_understood_are_named(text):
    with pytest.raises(ConfigError, match=text.split(":", maxsplit=1)[0]):
        parse_faults(text)


# --- selection ------------------------------------------------------------------------------------------------


def test_selection_follows_place_and_offer(make_node):
    a, b = make_node("a", "auto").info, make_node("b", "auto").info
    cpu = torch.device("cpu")
    elsewhere_pid = msgspec.structs.replace(b, pid=b.pid + 1)
    elsewhere_host = msgspec.structs.replace(b, host_id="another", pid=7)
    tcp_only = msgspec.structs.replace(b, transports={"tcp": b.transports["tcp"]})
    assert choose_transport(a, b, "auto", cpu) == "local"
    assert choose_transport(a, elsewhere_pid, "auto", cpu) == "shm"
    assert choose_transport(a, elsewhere_host, "auto", cpu) == ("nixl" if "nixl" in b.transports else "tcp")
    assert choose_transport(a, tcp_only, "auto", cpu) == "tcp"
    assert choose_transport(a, b, "tcp", cpu) == "tcp"
    for ours, theirs in [(a, b), (a, elsewhere_pid), (a, elsewhere_host), (a, tcp_only)]:
        assert candidates(ours, theirs)[0] == candidates(theirs, ours)[0]
    with pytest.raises(TransportError, match="local: the nodes are not in one process"):
        choose_transport(a, elsewhere_pid, "local", cpu)
    with pytest.raises(TransportError, match="shm: the nodes are not on one host"):
        choose_transport(a, elsewhere_host, "shm", cpu)
    with pytest.raises(TransportError, match="shm: b does not offer it"):
        choose_transport(a, tcp_only, "shm", cpu)
    with pytest.raises(TransportError, match="choose auto, local, shm, cuda_ipc, nixl, ucx, tcp"):
        choose_transport(a, b, "rdma", cpu)


def test_a_forced_transport_that_the_device_rules_out_is_a_config_error():
    with pytest.raises(ConfigError, match="shm moves CPU pools only"):
        PoolNode("x", "shm", device="cuda")
    with pytest.raises(ConfigError, match="cuda_ipc moves GPU pools only"):
        PoolNode("x", "cuda_ipc", device="cpu")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        PoolNode("x", "carrier-pigeon")
