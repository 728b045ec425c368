"""A node's ZMQ sockets, and the poller over them that other threads can wake."""

from __future__ import annotations

import contextlib
import os

import zmq
from zmq.utils import z85

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.security import ClusterKeys
from tandem.node.control.client_keys import ClientKeys

Socket = zmq.Socket[bytes]


def advertised(address: str, host: str) -> str:
    """The address (tcp://host:port) of a bound socket as others reach it: by `host`, unless that is ""."""
    if not host:
        return address
    return f"tcp://{f'[{host}]' if ':' in host else host}:{address.rpartition(':')[2]}"


class ControlSockets:
    """The ZMQ sockets of a node: `bind` first, on any thread; then all but `wake` belongs to one thread, which ends
    with `close`."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._keys = keys
        self._context: zmq.Context[Socket] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self._client_keys: ClientKeys | None = None
        self._poller = zmq.Poller()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def bind(self, host: str, port: int) -> str:
        """Binds the ROUTER socket and returns its address; raises ConfigError when the port is taken."""
        self._configure(self.router, server=True)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"can't bind the control socket to {host}:{port}: {error}; choose another --port"
            ) from error
        self.watch(self.router)
        self.watch(self._wake_read)
        return self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def open_dealer(self, address: str, identity: bytes) -> Socket:
        """A connection to `address`. `identity`: its name there, b"" for one that ZMQ makes up. Raises ZMQError when
        `address` is none, or no descriptor is left."""
        socket = self._context.socket(zmq.DEALER)
        try:
            self._configure(socket, server=False)
            if identity:
                socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(address)
        except BaseException:
            socket.close(linger=0)
            raise
        self.watch(socket)
        return socket

    def watch(self, source: Socket | int) -> None:
        """Makes `poll` return a socket, or a file descriptor, when it is readable."""
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Socket | int) -> None:
        self._poller.unregister(source)

    def wake(self) -> None:
        """Makes the running or next `poll` return; from any thread."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is woken already, or has stopped
            os.write(self._wake_write, b"\0")

    def poll(self, timeout_s: float) -> set[Socket | int]:
        ready = {source for source, _ in self._poller.poll(int(timeout_s * 1000))}
        if self._client_keys is not None and self._client_keys.socket in ready:
            self._client_keys.answer()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return ready

    def reply(self, identity: bytes, payload: bytes) -> bool:
        """Sends to a connection of the ROUTER socket; False if it is gone, as the peer's silence will tell."""
        try:
            self.router.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH
            return False
        return True

    def close(self) -> None:
        """Closes the remaining sockets, after every dealer was closed."""
        self.router.close(linger=500)
        if self._client_keys is not None:
            self._client_keys.close()
        self._context.term()
        os.close(self._wake_read)

    def _configure(self, socket: Socket, server: bool) -> None:
        """Sets a socket's options. There is no high-water mark: a full queue would drop or hang, and memory is bounded
        by ending silent peers."""
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, 256 << 20)
        if not self._keys.curve:
            return
        if server:
            self._client_keys = ClientKeys(self._context, z85.decode(self._keys.curve_keypair("client")[0]))
            self._client_keys.require(socket)
            self.watch(self._client_keys.socket)
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys.curve_keypair("server")
        else:
            socket.curve_publickey, socket.curve_secretkey = self._keys.curve_keypair("client")
            socket.curve_serverkey = self._keys.curve_keypair("server")[0]
