"""The wire format of a KV socket: a preface that proves who speaks, frames, and reads and writes with deadlines.

    sink → source   16 random bytes
    source → sink   Preface (its MAC covers the sink's bytes)
    sink → source   PrefaceReply (its MAC covers the source's bytes, so that both sides have proven the key)
    source → sink   WriteFrame + payload | FlushFrame, any number
    sink → source   FlushReply, one for each FlushFrame

A frame is: u32 length of the header, header (msgpack), payload as long as the header implies. Nothing is encrypted;
docs/security.md says what that means.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from tandem.engine.contracts.errors import PeerLostError, TransportError
from tandem.engine.contracts.wire.decoder import WireDecoder

NONCE_BYTES = 16
MAX_HEADER_BYTES = 1 << 20  # a guess
MAX_PREFACE_BYTES = 4 << 10  # header size before the sender has proven anything; a guess
MAX_FRAME_BYTES = 8 << 20  # payload, unless a single block is larger; a guess
_MAX_IOVECS = 512  # below every system's IOV_MAX
# Bytes that have arrived are still read past a deadline, since they may have come while this process was stopped; a
# stranger who sends a byte at a time gains no more than this for each of them.
_LEAST_WAIT_S = 1e-3  # a guess
_LENGTH = struct.Struct("!I")


class Preface(msgspec.Struct, frozen=True):
    """Who speaks to whom, both with epochs, and 16 random bytes for the answer's MAC."""

    node_id: str
    epoch: int
    sink_id: str
    sink_epoch: int
    nonce: bytes
    mac: bytes = b""


class PrefaceReply(msgspec.Struct, frozen=True):
    """The sink's answer to a Preface: whether the source may write."""

    error: str  # "": welcome
    mac: bytes


class WriteFrame(msgspec.Struct, frozen=True, tag="w"):
    """A frame with KV. Its payload is the blocks one after the other, each in wire order
    (kv_connector/layouts/geometry.py)."""

    grant_id: int
    block_ids: tuple[int, ...]
    first_layer: int
    num_layers: int
    num_valid: tuple[int, ...]


class FlushFrame(msgspec.Struct, frozen=True, tag="f"):
    """Source -> sink: answer once every write of this grant before here is in the pool. `sequence` comes back."""

    sequence: int
    grant_id: int


class FlushReply(msgspec.Struct, frozen=True):
    """Sink -> source: the answer to the FlushFrame of this `sequence`."""

    sequence: int
    error: str  # "": every write of the grant is in the pool


Frame = WriteFrame | FlushFrame
decode_frame: WireDecoder[Frame] = WireDecoder(Frame)
decode_preface: WireDecoder[Preface] = WireDecoder(Preface)
decode_preface_reply: WireDecoder[PrefaceReply] = WireDecoder(PrefaceReply)
decode_flush_reply: WireDecoder[FlushReply] = WireDecoder(FlushReply)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def sign_preface(key: bytes, preface: Preface, sink_nonce: bytes) -> Preface:
    return msgspec.structs.replace(preface, mac=_preface_mac(key, preface, sink_nonce))


def preface_is_genuine(key: bytes, preface: Preface, sink_nonce: bytes) -> bool:
    return hmac.compare_digest(preface.mac, _preface_mac(key, preface, sink_nonce))


def reply_mac(key: bytes, error: str, source_nonce: bytes) -> bytes:
    return hmac.new(key, b"sink" + source_nonce + error.encode(), hashlib.sha256).digest()


def _preface_mac(key: bytes, preface: Preface, sink_nonce: bytes) -> bytes:
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(preface, mac=b""))
    return hmac.new(key, b"source" + sink_nonce + unsigned, hashlib.sha256).digest()


def send_frame(sock: socket.socket, header: msgspec.Struct, payload: Sequence[memoryview] = ()) -> None:
    """Sends a frame and waits for that; the socket's timeout bounds each wait for progress. Raises TransportError,
    PeerLostError."""
    encoded = msgspec.msgpack.encode(header)
    assert len(encoded) <= MAX_HEADER_BYTES, "a frame names too many blocks"
    send_views(sock, [memoryview(_LENGTH.pack(len(encoded)) + encoded), *payload])


def receive_header(sock: socket.socket, most_bytes: int = MAX_HEADER_BYTES, deadline: float | None = None) -> bytes:
    """Receives the next header. Raises PeerLostError at the end of the stream, TransportError for one longer than
    `most_bytes`, past the socket's timeout (for each wait) and past `deadline` (for all of it, monotonic seconds)."""
    length = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(length), deadline)
    (header_bytes,) = _LENGTH.unpack(length)
    if header_bytes > most_bytes:
        raise TransportError(f"a frame header of {header_bytes} bytes: not a Tandem node, or out of step")
    header = bytearray(header_bytes)
    receive_into(sock, memoryview(header), deadline)
    return bytes(header)


def send_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    pending = list(views)
    first = 0
    while first < len(pending):
        try:
            sent = sock.sendmsg(pending[first : first + _MAX_IOVECS])
        except OSError as error:
            raise transport_error(error, "send") from error
        first = advance(pending, first, sent)


def receive_into(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fills `view`. A `deadline`, as in `receive_header`, sets the socket's timeout."""
    while view:
        try:
            if deadline is not None:
                sock.settimeout(max(deadline - time.monotonic(), _LEAST_WAIT_S))
            received = sock.recv_into(view)
        except OSError as error:
            raise transport_error(error, "receive") from error
        if received == 0:
            raise PeerLostError("the peer closed the KV connection")
        view = view[received:]


def advance(views: list[memoryview], first: int, nbytes: int) -> int:
    """Drops `nbytes` from views[first:]; returns the index of the first view with bytes left."""
    while first < len(views) and nbytes >= len(views[first]):
        nbytes -= len(views[first])
        first += 1
    if nbytes:
        views[first] = views[first][nbytes:]
    return first


def transport_error(error: OSError, verb: str) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportError(f"no progress in time ({verb}): the peer is stopped, overloaded or unreachable")
    return PeerLostError(f"the KV connection broke ({verb}): {error.strerror or error}")
