"""Every decoder of a node, of KV links and transports: whatever the bytes, one error and nothing else; and a KV port
that gets them serves its nodes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from waiting import PATIENCE_S, wait_until
from wire_fuzz import WireFuzz

from tandem.engine.contracts.config import ModelOptions, NodeOptions
from tandem.engine.contracts.errors import DecodeError, TandemError
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Status, Welcome
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import (
    Candidates,
    Continuation,
    FirstToken,
    NodeInfo,
    PeerRef,
    PrefixHint,
    TokenLogprobs,
)
from tandem.engine.contracts.wire.requests import Cancel, Migrate, Submit, TokenDelta, Tokens
from tandem.engine.contracts.wire.work import NodeReport
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.links import landing_wire, tcp_wire
from tandem.kv_connector.transports.links import transport as link_transport
from tandem.kv_connector.transports.links.tcp_wire import FlushFrame, Preface, WriteFrame, new_nonce, sign_preface
from tandem.kv_connector.transports.links.transport import LinkExport
from tandem.kv_connector.transports.mapped import base, cuda_ipc, shm
from tandem.kv_connector.transports.mapped.base import MappedExport
from tandem.kv_connector.transports.mapped.shm import ShmHandle
from tandem.node.ranks import channel
from tests.fakes.kv_pools import KEYS, SMALL, PoolNode, connected

REF = PeerRef("d", 1 << 60, "tcp://127.0.0.1:7001")
INFO = NodeInfo(node_id="p", epoch=1 << 63, role="prefill", layout=SMALL, transports={"tcp": b"\x92\xa1h\x01"})
GRANT = KVGrant(
    request_id="r0", attempt=0, grant_id=5, source_id="p", source_epoch=1, sink_id="d", sink_epoch=2, first_block=0,
    block_ids=(1, 2), num_prompt_tokens=20, lease_s=3.0, signature=b"s" * 16,
)  # fmt: skip
READY = KVReady(
    request_id="r0", attempt=0, grant_id=5, grant_signature=b"s" * 16, source_id="p", source_epoch=1, sink_epoch=2,
    first_tokens=(FirstToken(0, 5, False, Candidates((5, 6), (-1.0, -2.0), (6,))),), digests=bytes(16),
    continuation=Continuation(3, (1, 2)),
)  # fmt: skip
TO_NODE = (
    Hello(wire_version=WIRE_VERSION, info=INFO),
    Ping(sequence=3),
    Submit(
        request_id="r0", attempt=0, mode="decode", prompt_token_ids=b"\1\0\0\0" * 20, peer=REF,
        sampling=SamplingParams(logit_bias=((1, 2.0),), stop_token_ids=(1,)), prefix=PrefixHint(REF, 4),
        media=(MediaItem.of(0, 4, "image", {"pixel_values": np.ones((1, 3), np.float32)}),),
    ),
    Cancel(request_id="r0", attempt=0, sample_indices=(0,)),
    Migrate(
        request_id="r0",
        attempt=0,
        sample_index=0,
        peer=REF,
        successor=AttemptKey("r0", 1),
        num_tokens=4,
        deadline_s=2.0,
    ),
    GRANT,
    READY,
)  # fmt: skip
FROM_NODE = (
    Welcome(info=INFO),
    Status(
        node_id="d", epoch=3, counters={"a": 1.0}, work=NodeReport(1e-4, prompts=((-0.5, 9), (1.0, 4)), num_streams=2)
    ),
    Tokens(deltas=(TokenDelta("r0", 0, 0, 0, (1, 2), "stop", 2, (TokenLogprobs((1,), (0.5,)),)),)),
    READY,
)
DECODERS: dict[str, tuple[Callable[[bytes], object], tuple[Any, ...]]] = {
    "to a node": (codec.decode_to_node, TO_NODE),
    "from a node": (codec.decode_from_node, FROM_NODE),
    "tcp frame": (tcp_wire.decode_frame, (WriteFrame(1, (1, 2), 0, 3, (8, 4)), FlushFrame(1, 2))),
    "preface": (tcp_wire.decode_preface, (Preface("p", 1, "d", 2, b"n" * 16, b"m" * 32),)),
    "preface reply": (tcp_wire.decode_preface_reply, (tcp_wire.PrefaceReply("no", b"m" * 32),)),
    "flush reply": (tcp_wire.decode_flush_reply, (tcp_wire.FlushReply(1, "no"),)),
    "landing frame": (landing_wire.decode_frame, (landing_wire.LandFrame(1, 2, (1,), 0, 1, (8,), 0, 64),)),
    "landing answer": (landing_wire.decode_answer, (landing_wire.Answer(1, "no"),)),
    "link export": (link_transport._decode_export, (LinkExport("127.0.0.1", 5),)),
    "mapped export": (base._decode_export, (MappedExport(1, 2, 3, b"h"),)),
    "shm handle": (shm._decode_handle, (ShmHandle(1, b"n" * 32, 64),)),
    "cuda handles": (cuda_ipc._decode_handles, ([cuda_ipc.CudaIpcHandle(b"h" * 64, 0, 64, 2)],)),
    "rank setup": (channel._decode_setup, (channel.RankSetup(NodeOptions("decode", ModelOptions("m")), 1, 2, 3),)),
    "rank command": (channel._decode_command, (channel.Command("warm_up"),)),
    "rank pool": (channel._decode_pool_file, (channel.PoolFile(1, 2),)),
}
SOME = pytest.param(3_000, id="some")
MANY = pytest.param(100_000, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("count", [SOME, MANY])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_decodes_or_says_that_it_is_no_message(name: str, count: int) -> None:
    decode, examples = DECODERS[name]
    fuzz, num_decoded = WireFuzz(7), 0
    for _ in range(count):
        try:
            decode(fuzz.any_of(examples))
        except DecodeError:
            continue
        num_decoded += 1
    assert 0 < num_decoded < count


# --- a KV port ----------------------------------------------------------------------------------------------


def connection(sink: PoolNode) -> socket.socket:
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    return socket.create_connection(("127.0.0.1", port), 3)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + header


def moves_right(source: PoolNode, sink: PoolNode, others: torch.Tensor) -> None:
    """One more hand-off is right, and no block but its own has changed."""
    grant = sink.grant(source.info, [1], request_id="after")
    with_channel = source.connect(sink.info)
    with_channel.write(Write(grant, [(0, 1)], None, [8]))
    with_channel.flush(grant)
    assert torch.equal(sink.pool[1], source.pool[0])
    assert torch.equal(sink.pool[2:], others[2:]), "bytes landed outside of a grant"
    with_channel.close()
    sink.transports.close_grant(grant.grant_id)


@pytest.mark.parametrize("count", [pytest.param(150, id="some"), pytest.param(10_000, id="many", marks=MANY.marks)])
def test_a_kv_port_outlives_strangers(make_node, count: int) -> None:
    fuzz = WireFuzz(11)
    source, sink = make_node("p", "tcp", seed=1), make_node("d", "tcp", timeout_s=0.5)
    sink.admit(source.info)
    before = sink.pool.clone()
    there = Preface(source.info.node_id, source.info.epoch, sink.info.node_id, sink.info.epoch, new_nonce())
    for _ in range(count):
        with connection(sink) as sock:
            nonce = sock.recv(16, socket.MSG_WAITALL)
            genuine = sign_preface(KEYS.derive("tcp"), there, nonce)
            payload = fuzz.absurd(genuine) if fuzz.rng.random() < 0.5 else fuzz.mutated(framed(_packed(genuine)))
            sock.sendall(payload if fuzz.rng.random() < 0.5 else framed(payload))
    wait_until(lambda: num_receivers() == 0, "a stranger's thread lives on")
    moves_right(source, sink, before)


@pytest.mark.parametrize("count", [pytest.param(150, id="some"), pytest.param(10_000, id="many", marks=MANY.marks)])
def test_a_kv_link_outlives_what_a_node_may_send(make_node, count: int) -> None:
    """Of one that holds the key: each bad frame costs its link, and lands nowhere but in its grant."""
    fuzz = WireFuzz(13)
    source, sink = make_node("p", "tcp", seed=1), make_node("d", "tcp", timeout_s=0.5)
    sink.admit(source.info)
    before = sink.pool.clone()
    me, there = (source.info.node_id, source.info.epoch), (sink.info.node_id, sink.info.epoch)
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    for number in range(count):
        grant = sink.grant(source.info, [0], request_id=f"r{number}")
        write = WriteFrame(grant.grant_id, (0,), 0, 3, (8,))
        with link_transport.dial(("127.0.0.1", port), me, there, KEYS.derive("tcp"), PATIENCE_S) as sock:
            try:
                sock.sendall(framed(fuzz.any_of((write, FlushFrame(1, grant.grant_id)))) + fuzz.noise())
            except OSError:
                pass  # the link was ended meanwhile
        sink.transports.close_grant(grant.grant_id)
    wait_until(lambda: num_receivers() == 0, "a link's thread lives on")
    moves_right(source, sink, before)


def num_receivers() -> int:
    return sum(thread.name == "kv-tcp-receiver" for thread in threading.enumerate())


def _packed(struct: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(struct)


@pytest.mark.parametrize("count", [pytest.param(200, id="some"), pytest.param(20_000, id="many", marks=MANY.marks)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peers_export_costs_at_most_its_channel(make_node, transport: str, count: int) -> None:
    """Whatever a peer says of its pool, this node maps nothing but a pool of that layout, or nothing."""
    fuzz = WireFuzz(17)
    source, sink = make_node("p", transport, timeout_s=0.2), make_node("d", transport)
    raw = sink.info.transports[transport]
    example = msgspec.msgpack.decode(raw)
    for _ in range(count):
        export = fuzz.mutated(raw) if fuzz.rng.random() < 0.4 else fuzz.absurd(example)
        info = msgspec.structs.replace(sink.info, transports={transport: export})
        try:
            if transport == "shm":
                source.admit(info)
            if transport == "shm" or _names_loopback(export):
                source.connect(info).close()
        except TandemError:
            pass
    connected(source, sink.info)


def _names_loopback(export: bytes) -> bool:
    """Nobody is dialled who is not here."""
    try:
        return msgspec.msgpack.decode(export, type=LinkExport).host in ("127.0.0.1", "\0", "garbage\0")
    except Exception:
        return True
