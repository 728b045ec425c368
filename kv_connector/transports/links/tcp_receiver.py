"""The sink's side of one KV connection: a thread that reads frames and does the writing into the pool.

It stores into a block only inside `GrantTable.writing`. When the grant closes meanwhile, an eventfd wakes it out of
waiting for bytes, and the rest of the frame is read into a scratch buffer.
"""

from __future__ import annotations

import os
import select
import socket

from tandem.engine.contracts.errors import GrantError, PeerLostError, TransportError
from tandem.kv_connector.layouts.geometry import byte_view
from tandem.kv_connector.layouts.staging import Staging
from tandem.kv_connector.transports.grants import GrantInUse
from tandem.kv_connector.transports.links.receiver import AuthenticatedSocket, LinkReceiver
from tandem.kv_connector.transports.links.tcp_wire import (
    MAX_FRAME_BYTES,
    FlushFrame,
    FlushReply,
    WriteFrame,
    advance,
    decode_frame,
    receive_header,
    receive_into,
    send_frame,
    transport_error,
)

_MAX_REFUSALS = 1024  # grants with refused writes that a source has not flushed; a guess
_SCRATCH_BYTES = 1 << 18  # a guess


class _GrantClosedError(Exception):
    """The grant was closed while its payload was being received."""


class TcpReceiver(LinkReceiver):
    """The thread of one source's link, which stores payloads into the pool: in place on a CPU, staged on a GPU."""

    def __init__(self, link: AuthenticatedSocket) -> None:
        super().__init__(link)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wait_payload = select.poll()
        self._wait_payload.register(link.sock, select.POLLIN)
        self._wait_payload.register(self._wake_fd, select.POLLIN)
        self._refused: dict[int, str] = {}
        pool = link.pool.pool_NHLPBD
        self._staging = Staging(self._geometry, pool.device, link.pool.ranks) if pool.is_cuda else None
        self._memory = memoryview(b"") if pool.is_cuda else byte_view(pool)

    def _serve_link(self) -> None:
        while True:
            self._sock.settimeout(None)  # between frames a source may be silent for long
            self._serve(decode_frame(receive_header(self._sock)))

    def _stop(self) -> None:
        os.close(self._wake_fd)  # no grant can call `_wake` any more: each writing section has been left

    def _serve(self, frame: WriteFrame | FlushFrame) -> None:
        self._sock.settimeout(self._timeout_s)
        if isinstance(frame, FlushFrame):
            send_frame(self._sock, FlushReply(frame.sequence, self._refused.pop(frame.grant_id, "")))
            return
        self._check_shape(frame)
        if self._staging is not None:
            self._receive_staged(frame, self._staging)
        else:
            self._receive_in_place(frame)

    def _check_shape(self, frame: WriteFrame) -> None:
        """Raises TransportError for a frame that makes no sense or is too long. That ends the connection: where the
        next frame begins can't be known."""
        self._check_blocks(frame)
        if len(frame.block_ids) > 1 and self._payload_bytes(frame) > MAX_FRAME_BYTES:
            raise TransportError(f"a frame of {self._payload_bytes(frame)} bytes, more than {MAX_FRAME_BYTES}")

    def _receive_in_place(self, frame: WriteFrame) -> None:
        layers = range(frame.first_layer, frame.first_layer + frame.num_layers)
        received = 0
        try:
            with self._grants.writing(frame.grant_id, self.source, frame.block_ids, self._wake) as grant:
                runs = [
                    self._memory[offset : offset + length]
                    for block_id, valid in zip(frame.block_ids, frame.num_valid, strict=True)
                    for offset, length in self._geometry.runs(block_id, layers, valid)
                ]
                first = 0
                while first < len(runs):
                    nbytes = self._receive_some(runs, first, grant)
                    received += nbytes
                    first = advance(runs, first, nbytes)
        except GrantError as error:
            self._refuse(frame, error.message)
        except _GrantClosedError:
            self._grants.count_refusal()
            self._refuse(frame, f"grant {frame.grant_id:#x} was closed while it was being written")
        self._discard(self._payload_bytes(frame) - received)

    def _receive_some(self, runs: list[memoryview], first: int, grant: GrantInUse) -> int:
        """Receives some bytes into runs[first:] and returns how many; 0 if none are there yet. Raises _GrantClosedError
        as soon as the grant closes."""
        if grant.closed:
            raise _GrantClosedError
        events = self._wait_payload.poll(self._timeout_s * 1000)
        if not events:
            raise TransportError("no payload in time: the source is stopped, overloaded or unreachable")
        if any(fd == self._wake_fd for fd, _ in events):
            self._clear_wake()
            return 0
        try:
            nbytes = self._sock.recvmsg_into(runs[first : first + 64], 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise transport_error(error, "receive") from error
        if nbytes == 0:
            raise PeerLostError("the source closed the KV connection inside a frame")
        return nbytes

    def _receive_staged(self, frame: WriteFrame, staging: Staging) -> None:
        layers = range(frame.first_layer, frame.first_layer + frame.num_layers)
        receive_into(self._sock, staging.buffer(self._payload_bytes(frame)))
        try:
            with self._grants.writing(frame.grant_id, self.source, frame.block_ids):
                staging.scatter(self._pool.pool_NHLPBD, frame.block_ids, layers, frame.num_valid)
        except GrantError as error:
            self._refuse(frame, error.message)

    def _refuse(self, frame: WriteFrame, reason: str) -> None:
        self._refused[frame.grant_id] = reason
        if len(self._refused) > _MAX_REFUSALS:
            raise TransportError(f"writes under {len(self._refused)} grants were refused and never flushed")

    def _discard(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            piece = scratch[: min(nbytes, len(scratch))]
            receive_into(self._sock, piece)
            nbytes -= len(piece)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
