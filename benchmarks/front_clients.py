"""Clients of a router for `front_load.py`: they send one request after another, or at a rate, and time first tokens."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
END_OF_ANSWER = b"0\r\n\r\n"  # the last chunk of a chunked body
NOT_ASKED = 0.0


@dataclass
class Counts:
    """What one client process saw in the measured time."""

    num_ended: int = 0
    num_late: int = 0  # due when every connection was busy, so sent later
    cpu_s: float = 0.0  # of this process, within the window
    ttft_s: list[float] = field(default_factory=list)


class Clients:
    """Clients that send `rate` requests a second over `num_streams` connections; 0: each connection asks again at
    once."""

    def __init__(self, port: int, num_streams: int, body: bytes, rate: float) -> None:
        self._request = HEAD % len(body) + body
        self._interval_s = 1 / rate if rate else 0.0
        self._poller = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._asked_at: dict[int, float] = {}  # NOT_ASKED: its first token has come
        for _ in range(num_streams):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[sock.fileno()] = sock
            self._poller.register(sock.fileno(), select.EPOLLIN)
        self._idle = deque(self._sockets)
        self._begin = 0.0
        self.counts = Counts()

    def run(self, begin: float, end: float) -> None:
        """Counts from `begin` to `end`, in seconds of time.monotonic."""
        self._begin = begin
        next_due = time.monotonic()
        if not self._interval_s:
            while self._idle:
                self._ask(self._idle.popleft(), next_due)
        cpu_before = 0.0
        while (now := time.monotonic()) < end:
            if now >= begin and not cpu_before:
                cpu_before = time.process_time()
            while self._interval_s and next_due <= now:
                if self._idle:
                    self._ask(self._idle.popleft(), next_due)
                else:
                    self.counts.num_late += 1
                next_due += self._interval_s
            for fileno, _ in self._poller.poll(max(0.0, next_due - now) if self._interval_s else 0.1):
                self._receive(fileno)
        self.counts.cpu_s = time.process_time() - cpu_before

    def _ask(self, fileno: int, due: float) -> None:
        self._asked_at[fileno] = due
        self._sockets[fileno].sendall(self._request)

    def _receive(self, fileno: int) -> None:
        data = self._sockets[fileno].recv(1 << 16)
        if not data:
            raise EOFError("the server closed a connection")
        now, asked_at = time.monotonic(), self._asked_at[fileno]
        counts = now >= self._begin
        if asked_at and b'"text"' in data:
            self._asked_at[fileno] = NOT_ASKED
            if counts:
                self.counts.ttft_s.append(now - asked_at)
        if data.endswith(END_OF_ANSWER):
            self.counts.num_ended += counts
            if self._interval_s:
                self._idle.append(fileno)
            else:
                self._ask(fileno, now)


def clients_main(
    port: int,
    num_streams: int,
    body: bytes,
    rate: float,
    times: tuple[float, float],
    barrier: Barrier,
    results: Queue[Counts],
) -> None:
    """Runs the clients of one process. `times`: seconds to warm up and to count, once all processes have come to the
    barrier."""
    clients = Clients(port, num_streams, body, rate)
    barrier.wait()
    begin = time.monotonic() + times[0]
    clients.run(begin, begin + times[1])
    results.put(clients.counts)
