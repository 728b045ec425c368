"""The source's side of one KV connection: sends frames, and at a flush asks the sink whether they were stored."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from tandem.engine.contracts.errors import DecodeError, PeerLostError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.geometry import BlockGeometry, byte_view, pool_stride_bytes
from tandem.kv_connector.layouts.staging import Staging
from tandem.kv_connector.transports.base import OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.links.tcp_wire import (
    MAX_FRAME_BYTES,
    MAX_PREFACE_BYTES,
    NONCE_BYTES,
    FlushFrame,
    Preface,
    WriteFrame,
    decode_flush_reply,
    decode_preface_reply,
    new_nonce,
    receive_header,
    receive_into,
    reply_mac,
    send_frame,
    sign_preface,
)
from tandem.kv_connector.transports.pool_channel import PoolChannel

_SEND_BUFFER_BYTES = 4 << 20  # a guess; what it reaches: docs/measurements.md#transports-within-a-host


def dial(address: tuple[str, int], me: NodeKey, sink: NodeKey, key: bytes, timeout_s: float) -> socket.socket:
    """Opens a connection on which both sides have proven the cluster's key. Raises TransportError, PeerLostError."""
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except (OSError, OverflowError, ValueError) as error:  # the latter two: for what is no address at all
        raise PeerLostError(f"can't connect to {sink.node_id} at {address[0]}:{address[1]}: {error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        deadline = time.monotonic() + timeout_s
        sink_nonce = bytearray(NONCE_BYTES)
        receive_into(sock, memoryview(sink_nonce), deadline)
        preface = Preface(*me, *sink, nonce=new_nonce())
        send_frame(sock, sign_preface(key, preface, bytes(sink_nonce)))
        reply = decode_preface_reply(receive_header(sock, MAX_PREFACE_BYTES, deadline))
        if not hmac.compare_digest(reply.mac, reply_mac(key, reply.error, preface.nonce)):
            raise TransportError(f"what answers at {address[0]}:{address[1]} doesn't hold this cluster's secret")
        if reply.error:
            raise PeerLostError(f"{sink.node_id} refused the KV connection: {reply.error}")
    except DecodeError as error:
        sock.close()
        raise TransportError(f"what answers at {address[0]}:{address[1]} is no Tandem node: {error}") from error
    except OSError as error:
        sock.close()
        raise PeerLostError(f"can't speak to {sink.node_id} at {address[0]}:{address[1]}: {error}") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(timeout_s)
    return sock


class TcpChannel(PoolChannel):
    """A channel over one TCP connection. Any failure ends it: after half a frame the stream can't be used again."""

    def __init__(self, source: RegisteredPool, sock: socket.socket, peer: NodeInfo, on_lost: OnLost) -> None:
        super().__init__(source, peer.key, on_lost)
        self._sock = sock
        self._sequence = 0
        assert peer.layout is not None, "only nodes are connected to"
        self._layout = peer.layout  # that of every pool written from; only strides may differ
        pool = source.pool_NHLPBD
        self._staging = Staging(BlockGeometry(peer.layout), pool.device) if pool.is_cuda else None

    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        geometry = BlockGeometry(self._layout, pool_stride_bytes(pool_NHLPBD))
        span = write.span(geometry.num_layers)
        for first, end in _frames(geometry, len(span), write.num_valid):
            sources, destinations = zip(*write.pairs[first:end], strict=True)
            valid = tuple(write.num_valid[first:end])
            if self._staging is not None:
                payload = [self._staging.gather(pool_NHLPBD, sources, span, valid)]
            else:
                payload = _views(byte_view(pool_NHLPBD), geometry, sources, span, valid)
            self._send(WriteFrame(write.grant.grant_id, destinations, span.start, len(span), valid), payload)

    def flush(self, grant: KVGrant) -> None:
        self._raise_if_ended()
        self._sequence += 1
        self._send(FlushFrame(self._sequence, grant.grant_id))
        try:
            reply = decode_flush_reply(receive_header(self._sock))
        except (TransportError, DecodeError) as error:
            self.lose(str(error))
            raise TransportError(f"no answer to a flush from {self.peer.node_id}: {error}") from error
        assert reply.sequence == self._sequence, "flushes are answered one by one"
        if reply.error:
            raise TransportError(f"{self.peer.node_id} refused: {reply.error}", request_id=grant.request_id)

    def _send(self, header: msgspec.Struct, payload: Sequence[memoryview] = ()) -> None:
        try:
            send_frame(self._sock, header, payload)
        except TransportError as error:
            self.lose(error.message)
            raise

    def _release(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is sending or waiting for a flush
        except OSError:
            pass
        self._sock.close()


def _views(
    memory: memoryview, geometry: BlockGeometry, block_ids: Sequence[int], layers: range, num_valid: Sequence[int]
) -> list[memoryview]:
    return [
        memory[offset : offset + length]
        for block_id, valid in zip(block_ids, num_valid, strict=True)
        for offset, length in geometry.runs(block_id, layers, valid)
    ]


def _frames(geometry: BlockGeometry, num_layers: int, num_valid: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the blocks [first, end) of each frame: as many as fit into MAX_FRAME_BYTES, at least one."""
    first, nbytes = 0, 0
    for index, valid in enumerate(num_valid):
        block_bytes = geometry.payload_bytes(num_layers, valid)
        if index > first and nbytes + block_bytes > MAX_FRAME_BYTES:
            yield first, index
            first, nbytes = index, 0
        nbytes += block_bytes
    yield first, len(num_valid)
