"""The entrance of links: a listening socket, a thread for each connection, and a bound on what strangers can use up.

Whoever reaches the port can connect. Until a connection has proven that it holds the cluster's key it costs a thread
and a few KiB, for a few seconds, and there are at most MAX_STRANGERS of them: one more ends the oldest. A node proves
itself within a round trip, so it is hardly ever the oldest, however many others there are.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.process.process_log import RateLimited

MAX_STRANGERS = 64  # a guess: far more than sources that dial at the same moment
MAX_CONNECTIONS = 1024  # a guess, strangers included: a link for each node that hands KV to this one
RETRY_S = 0.1  # a guess
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
logger = logging.getLogger(__name__)
limited = RateLimited(logger)


class LinkDoor:
    """Accepts connections. For each, `serve(sock, address)` is called on a thread of its own; the connection ends when
    it returns. `serve` must call `admit` as soon as the other side has proven itself."""

    def __init__(self, name: str, host: str, serve: Callable[[socket.socket, object], None]) -> None:
        """Starts to listen. Raises ConfigError when `host` is no address of this machine, OSError when no socket is
        left."""
        self._name, self._serve = name, serve
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._num_connections = 0
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=64)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise ConfigError(
                f"can't listen for KV on {host or 'any address'}: {error}; give another --host"
            ) from error
        threading.Thread(target=self._accept, name=f"kv-{name}-listener", daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def admit(self, sock: socket.socket) -> None:
        """Notes that a connection is no stranger's any more."""
        with self._lock:
            self._strangers.pop(sock, None)

    def close(self) -> None:
        """Lets nobody in any more. Admitted connections stay, strangers are ended."""
        with self._lock:
            self._closed = True
            for sock in self._strangers:
                _end(sock)
        _end(self._listener)  # wakes the accepting thread; close alone does not
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                with self._lock:
                    if self._closed:
                        return
                limited.warning("can't accept KV connections for a moment: %s", error)
                time.sleep(RETRY_S)  # out of file descriptors: the kernel would refuse at once again
                continue
            if not self._let_in(sock):
                sock.close()
                continue
            try:
                thread = threading.Thread(
                    target=self._run, args=(sock, address), name=f"kv-{self._name}-receiver", daemon=True
                )
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                limited.warning("a KV connection is turned away: %s", error)
                self._let_out(sock)

    def _let_in(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._closed or self._num_connections >= MAX_CONNECTIONS:
                limited.warning("a KV connection is turned away: there are %d", self._num_connections)
                return False
            self._num_connections += 1
            self._strangers[sock] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(oldest)  # its thread hears of it, and closes it
                limited.warning("more than %d KV connections have not said who they are", MAX_STRANGERS)
        return True

    def _run(self, sock: socket.socket, address: object) -> None:
        try:
            self._serve(sock, address)
        finally:
            self._let_out(sock)

    def _let_out(self, sock: socket.socket) -> None:
        """Closes a connection, under the lock: so `_let_in` never ends one whose descriptor another has got
        meanwhile."""
        with self._lock:
            self._strangers.pop(sock, None)
            self._num_connections -= 1
            sock.close()


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was faster
