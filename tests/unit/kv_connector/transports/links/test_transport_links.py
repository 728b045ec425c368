"""Links between nodes: who may connect, how links and epochs end, which transport two nodes choose."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.errors import ConfigError, GrantError, HandshakeError, PeerLostError, TransportError
from tandem.engine.contracts.security import ClusterKeys
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.links import door
from tandem.kv_connector.transports.links.door import MAX_STRANGERS
from tandem.kv_connector.transports.links.tcp_wire import (
    MAX_PREFACE_BYTES,
    NONCE_BYTES,
    Preface,
    new_nonce,
    send_frame,
    sign_preface,
)
from tandem.kv_connector.transports.links.transport import LinkExport
from tandem.kv_connector.transports.mapped.base import MappedExport
from tandem.kv_connector.transports.mapped.shm import ShmHandle
from tandem.kv_connector.transports.selection import candidates, choose_transport
from tests.fakes.kv_pools import (
    ALL,
    KEYS,
    RECEIVER_WRITES,
    PoolNode,
    hangs_up,
    refused,
)

# --- who may connect ----------------------------------------------------------------------------------------


def raw_socket(sink: PoolNode) -> socket.socket:
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


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


def test_tcp_believes_nobody_who_cannot_sign(make_pair):
    source, sink, _ = make_pair("tcp")
    me, there = source.info, sink.info
    named = Preface(me.node_id, me.epoch, there.node_id, there.epoch, new_nonce())
    for key in (b"", ClusterKeys(b"another secret!!", curve=False).derive("tcp")):
        with raw_socket(sink) as sock:
            nonce = sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
            send_frame(sock, sign_preface(key, named, nonce))
            assert sock.recv(1) == b"", "it is not even told that this is the node that it looks for"
    with raw_socket(sink) as sock:
        nonce = sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        send_frame(sock, sign_preface(KEYS.derive("tcp"), named, nonce))
        assert sock.recv(1)


def test_tcp_takes_the_control_host_for_a_wildcard(make_pair):
    source, sink, _ = make_pair("tcp")
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    exports = {"tcp": msgspec.msgpack.encode(LinkExport("0.0.0.0", port))}
    info = msgspec.structs.replace(sink.info, transports=exports, control_address="tcp://127.0.0.1:5555")
    source.connect(info)
    with pytest.raises(PeerLostError, match="control address"):
        source.connect(msgspec.structs.replace(info, control_address=""))


def test_tcp_goes_to_the_advertised_host_on_the_port_of_the_export(make_pair):
    source, sink, _ = make_pair("tcp")
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    info = msgspec.structs.replace(sink.info, control_address="tcp://127.0.0.2:5555")
    with socket.create_server(("127.0.0.2", port)) as relay:
        relay.settimeout(PATIENCE_S)
        thread = threading.Thread(target=lambda: relay.accept()[0].close())
        thread.start()
        with pytest.raises(PeerLostError):
            source.connect(info)
        thread.join()


def test_tcp_gives_a_stranger_no_memory_and_little_time(make_node):
    sink = make_node("d", "tcp", timeout_s=0.5)
    with raw_socket(sink) as sock:
        sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall((MAX_PREFACE_BYTES + 1).to_bytes(4, "big"))
        assert hangs_up(sock), "it would wait for more than any preface has"
    with raw_socket(sink) as sock:
        sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall(MAX_PREFACE_BYTES.to_bytes(4, "big"))
        assert any(is_cut_off(sock) for _ in range(500)), "each byte is progress, and the whole is none"


def is_cut_off(sock: socket.socket) -> bool:
    time.sleep(0.02)
    try:
        sock.sendall(b"\0")
    except OSError:
        return True
    return False


def test_tcp_bounds_strangers_and_lets_nodes_in_beside_them(make_node):
    source, sink = make_node("p", "tcp"), make_node("d", "tcp", timeout_s=60.0)
    sink.admit(source.info)
    strangers = [raw_socket(sink) for _ in range(MAX_STRANGERS + 8)]
    channel = source.connect(sink.info)
    grant = sink.grant(source.info, [1])
    channel.write(Write(grant, [(0, 1)], None, [8]))
    channel.flush(grant)
    assert torch.equal(sink.pool[1], source.pool[0])
    for sock in strangers[:8]:
        sock.recv(NONCE_BYTES, socket.MSG_WAITALL)
        assert hangs_up(sock), "the oldest make room"
    wait_until(lambda: num_threads("kv-tcp-receiver") <= MAX_STRANGERS + 1)  # one that hung up ends a moment later
    for sock in strangers:
        sock.close()
    wait_until(lambda: num_threads("kv-tcp-receiver") == 1)


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_tcp_has_a_bound_on_all_links(make_node, monkeypatch):
    monkeypatch.setattr(door, "MAX_CONNECTIONS", 1)
    source, other, sink = make_node("p", "tcp"), make_node("p2", "tcp"), make_node("d", "tcp")
    channel = source.connect(sink.info)
    with pytest.raises(TransportError):
        other.connect(sink.info)
    channel.close()
    wait_until(lambda: num_threads("kv-tcp-receiver") == 0)
    other.connect(sink.info)


def test_tcp_outlives_a_moment_without_threads_or_descriptors(make_node, monkeypatch):
    source, sink = make_node("p", "tcp"), make_node("d", "tcp")

    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", none_left)  # a receiver needs one
        with pytest.raises(PeerLostError):
            source.connect(sink.info)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "kv-tcp-receiver":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerLostError):
            source.connect(sink.info)
    source.connect(sink.info)


@pytest.mark.parametrize("port", [0, -1, 1 << 16, 1 << 40])
@pytest.mark.parametrize("host", ["127.0.0.1", "no\0host", "x" * 70])
def test_an_address_that_is_none_costs_the_channel(make_node, host, port):
    source, sink = make_node("p", "tcp"), make_node("d", "tcp")
    wrong = msgspec.structs.replace(sink.info, transports={"tcp": msgspec.msgpack.encode(LinkExport(host, port))})
    with pytest.raises(PeerLostError, match="can't connect"):
        source.connect(wrong)


def altered_export(info, **changes):
    export = msgspec.structs.replace(msgspec.msgpack.decode(info.transports["shm"], type=MappedExport), **changes)
    return msgspec.structs.replace(info, transports={"shm": msgspec.msgpack.encode(export)})


def test_shm_maps_nothing_but_the_pool_that_was_exported(make_node, make_pair):
    source, sink, _ = make_pair("shm")
    export = msgspec.msgpack.decode(sink.info.transports["shm"], type=MappedExport)
    with pytest.raises(PeerLostError, match="pid belongs to another"):
        source.connect(altered_export(sink.info, start_time=export.start_time + 1))
    for pid in (2**22 - 3, 2**40, -1):
        with pytest.raises(PeerLostError, match="is gone"):
            source.connect(altered_export(sink.info, pid=pid))
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


def test_a_shared_pool_keeps_its_size(make_node):
    """No peer's store may ever meet the end of the file."""
    sink = make_node("d", "shm")
    fd, _ = sink.transports.pool_file()
    size = os.fstat(fd).st_size
    for wrong in (0, size - 4096, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, wrong)
    assert os.fstat(fd).st_size == size


def test_shm_is_not_for_other_users(make_node, monkeypatch):
    source, sink = make_node("p", "shm"), make_node("d", "shm")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(TransportError, match=f"belongs to user {user}, this one to {user + 1}"):
        source.connect(sink.info)


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
        channel.write(Write(grant, [(0, 1)], None, [8]))
    channel.close()


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_a_fenced_epoch_is_barred_and_its_successor_is_not(make_node, make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [1])
    before = sink.pool.clone()
    sink.transports.fence(source.info.key).result(PATIENCE_S)
    assert refused(channel, grant, [(0, 1)])
    with pytest.raises(GrantError):
        sink.grant(source.info, [1])
    assert torch.equal(sink.pool, before)
    if transport != "local":
        wait_until(lambda: len(source.lost) == 1)
        with pytest.raises(PeerLostError, match="fenced"):
            source.connect(sink.info)
    reborn = make_node("p", transport, seed=9)
    sink.admit(reborn.info)
    grant = sink.grant(reborn.info, [1])
    new_channel = reborn.connect(sink.info)
    new_channel.write(Write(grant, [(0, 1)], None, [8]))
    new_channel.flush(grant)
    assert torch.equal(sink.pool[1], reborn.pool[0])


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_a_fenced_epoch_that_lives_is_served_again_once_admitted(make_pair, transport):
    """A source that was only silent for a while: its old grants stay closed, new ones work."""
    source, sink, _ = make_pair(transport)
    old = sink.grant(source.info, [1])
    before = sink.pool.clone()
    fence = sink.transports.fence(source.info.key)
    sink.admit(source.info)
    channel = source.connect(sink.info)
    fence.result(PATIENCE_S)  # it waits for connections from before, not for the new one
    assert refused(channel, old, [(0, 1)])
    assert torch.equal(sink.pool, before)
    new = sink.grant(source.info, [2])
    channel.write(Write(new, [(3, 2)], None, [8]))
    channel.flush(new)
    assert torch.equal(sink.pool[2], source.pool[3])


@pytest.mark.parametrize("transport", ALL)
def test_writes_and_flushes_after_close_fail(make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [1])
    channel.close()
    channel.close()
    with pytest.raises(PeerLostError, match="closed here"):
        channel.write(Write(grant, [(0, 1)], None, [8]))
    with pytest.raises(PeerLostError):
        channel.flush(grant)
    assert source.lost == []


def test_closing_a_node_ends_its_threads(make_pair):
    others = set(threading.enumerate())
    _, sink, _ = make_pair("tcp")
    wait_until(lambda: any(thread.name == "kv-tcp-receiver" for thread in set(threading.enumerate()) - others))
    sink.close()
    assert not any(thread.name == "kv-tcp-receiver" for thread in set(threading.enumerate()) - others)


# --- selection ----------------------------------------------------------------------------------------------


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


def test_the_transport_is_named_in_log_and_metrics(make_node, caplog):
    source, sink = make_node("p", "auto"), make_node("d", "auto")
    elsewhere = msgspec.structs.replace(sink.info, transports={"tcp": sink.info.transports["tcp"]})
    with caplog.at_level("INFO"):
        source.connect(sink.info)
        source.connect(elsewhere)
    said = [record.getMessage() for record in caplog.records if "KV goes" in record.getMessage()]
    assert said == ["KV goes to d over local", "KV goes to d over tcp"]
    counted = source.transports.counters
    assert {name for name, count in counted.items() if count} == {"kv_channels_local", "kv_channels_tcp"}


def test_nodes_that_nothing_connects_refuse_each_other(make_node):
    a, b = make_node("a", "shm"), make_node("b", "tcp")
    with pytest.raises(HandshakeError, match=r"shm: b does not offer it.*give both --transport auto") as refused:
        a.transports.check_peer(a.info, b.info)
    assert refused.value.field == "transport"
    with pytest.raises(HandshakeError, match="tcp: a does not offer it"):
        b.transports.check_peer(b.info, a.info)


def test_a_forced_transport_that_the_device_rules_out_is_a_config_error():
    with pytest.raises(ConfigError, match=r"shm moves CPU pools only.*or choose auto"):
        PoolNode("x", "shm", device="cuda")
    with pytest.raises(ConfigError, match="cuda_ipc moves GPU pools only"):
        PoolNode("x", "cuda_ipc", device="cpu")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        PoolNode("x", "carrier-pigeon")
