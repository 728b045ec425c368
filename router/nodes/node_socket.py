"""A ZMQ connection to one address, with the monitor that tells how its handshakes end: made whole, or not at all.

Descriptors and sockets may run out at each step of opening one. What was made until then is closed again, so that there
is no half-made connection that a later close or tick could stumble over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.engine.contracts.security import ClusterKeys

FAILED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED[0] | FAILED[1] | FAILED[2]
# A connection takes three of a context's sockets: itself, and both ends of its monitor. This is enough for 5,000 nodes,
# ZMQ's own limit of 1,023 for 341.
MAX_SOCKETS = 16_384

_numbers = itertools.count()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A ZMQ context for all connections of a process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class NodeSocket:
    """A ZMQ socket and its monitor. `on_readable` and `on_event` are called by the running event loop when there may be
    something to receive."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        keys: ClusterKeys,
        on_readable: Callable[[], None],
        on_event: Callable[[], None],
    ) -> None:
        """Raises ZMQError, OSError or ValueError: an address that ZMQ can't use, no descriptor or no socket left."""
        self._loop = asyncio.get_running_loop()
        self._watched: list[int] = []
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket: zmq.Socket[bytes] | None = context.socket(zmq.DEALER)
        try:
            self._set_up(context, self._socket, address, identity, keys)
            for socket, callback in ((self._socket, on_readable), (self._monitor, on_event)):
                assert socket is not None
                descriptor = socket.fileno()
                self._loop.add_reader(descriptor, callback)
                self._watched.append(descriptor)
        except BaseException:
            self.close(linger_ms=0)
            raise

    def _set_up(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        address: str,
        identity: bytes,
        keys: ClusterKeys,
    ) -> None:
        socket.setsockopt(zmq.IDENTITY, identity)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.RECONNECT_IVL_MAX, 1000)):
            socket.setsockopt(option, value)
        if keys.curve:
            socket.curve_publickey, socket.curve_secretkey = keys.curve_keypair("client")
            socket.curve_serverkey = keys.curve_keypair("server")[0]
        # Not `get_monitor_socket`, which loses its socket when it has no descriptor to connect it with.
        events_at = f"inproc://monitor-{next(_numbers)}"
        socket.monitor(events_at, EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(events_at)
        socket.connect(address)

    def send(self, payload: bytes) -> bool:
        """Sends a message. Returns whether something has come in meanwhile: the descriptor, which is edge-triggered,
        may not tell of that."""
        assert self._socket is not None
        self._socket.send(payload, zmq.NOBLOCK)
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> bytes | None:
        assert self._socket is not None
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def event(self) -> int | None:
        """The next of `EVENTS`, in the order in which they happened; None: no other has happened."""
        assert self._monitor is not None
        try:
            parts = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return int(parse_monitor_message(parts)["event"])

    def close(self, linger_ms: int) -> None:
        """Closes socket and monitor. `linger_ms`: how long what was sent last may still go out. May be called in every
        state, and again."""
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._watched.clear()
        socket, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        if socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
        if monitor is not None:
            monitor.close(linger=0)
        if socket is not None:
            socket.close(linger=linger_ms)
