"""How processes that must launch the same number of steps agree on each: how many rows it has room for.

Each tells all others, before its n-th step, how many rows it brings, and waits until it has heard the same of them. The
n-th step of one goes with the n-th of all others, whatever they do in it.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from tandem.engine.parallel.rendezvous import STUCK_S
from tandem.engine.process.watched import end_process, watched_thread

STEP = struct.Struct("<qi")  # number of the step, rows
NOTHING_MORE = -1  # in place of rows: this process needs no step any more


class StepAgreement:
    """One process's end. `agree`, `is_behind` and `leave` belong to one thread; another one of its own hears the
    others."""

    def __init__(
        self,
        links: Mapping[int, socket.socket],
        on_lost: Callable[[str], object] = end_process,
        stuck_s: float = STUCK_S,
    ) -> None:
        """`links`: a stream to each other process, by its rank. `on_lost` is told, from another thread, when one ended
        without which this one can't go on."""
        self._links = dict(links)
        self._on_lost, self._stuck_s = on_lost, stuck_s
        self._num_steps = 0  # that this process has told of
        self._heard = threading.Condition()
        # By step, of those that this process has still to agree on.
        self._rows: dict[int, dict[int, int]] = {rank: {} for rank in links}
        self._gone: set[int] = set()  # that need no step any more
        self._has_left = self._is_closed = False
        self._wake: Callable[[], object] = lambda: None
        self._readable = selectors.DefaultSelector()
        for rank, link in self._links.items():  # here: when the thread begins, they may have been closed
            self._readable.register(link, selectors.EVENT_READ, rank)
        self._reader = watched_thread(self._read, "step-agreement")
        self._reader.start()

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Has `wake` called, from another thread, whenever another process begins a step that this one hasn't."""
        self._wake = wake
        if self.is_behind:
            wake()

    @property
    def is_behind(self) -> bool:
        """Whether another process has begun a step that this one hasn't."""
        return any(self._rows.values())

    def agree(self, rows: int) -> int:
        """Begins the next step with so many rows, and returns the most that any process brings to it. Raises
        TimeoutError where one does not come to it, and OSError where one is gone."""
        self._num_steps += 1
        self._tell(rows)
        number, deadline = self._num_steps, time.monotonic() + self._stuck_s
        with self._heard:
            while not all(number in said for said in self._rows.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = sorted(rank for rank, said in self._rows.items() if number not in said)
                    raise TimeoutError(f"nodes {late} of the group have not begun step {number}: restart the group")
                self._heard.wait(left)
            return max([rows, *(said.pop(number) for said in self._rows.values())])

    def leave(self) -> bool:
        """Says, once, that this process needs no step any more. Returns whether that is so of all; until then steps of
        others go on and this one takes part."""
        if not self._has_left:
            self._has_left = True
            self._tell(NOTHING_MORE)
        return len(self._gone) == len(self._links) and not self.is_behind

    def close(self) -> None:
        self._is_closed = True
        for link in self._links.values():
            link.close()
        self._reader.join()

    def _tell(self, rows: int) -> None:
        message = STEP.pack(self._num_steps, rows)
        for rank, link in self._links.items():
            try:
                link.sendall(message)
            except OSError:
                if rank not in self._gone:
                    raise

    def _read(self) -> None:
        received = dict.fromkeys(self._links, b"")
        with self._readable as selector:
            while selector.get_map():
                for key, _ in selector.select(0.5):
                    data = self._received(self._links[key.data])
                    received[key.data] += data
                    while len(received[key.data]) >= STEP.size:
                        self._hear(key.data, *STEP.unpack_from(received[key.data]))
                        received[key.data] = received[key.data][STEP.size :]
                    if not data:
                        selector.unregister(key.fileobj)
                        self._ended(key.data)
                if self._is_closed:
                    return

    def _received(self, link: socket.socket) -> bytes:
        try:
            return link.recv(1 << 12)
        except OSError:
            return b""

    def _hear(self, rank: int, number: int, rows: int) -> None:
        with self._heard:
            if rows == NOTHING_MORE:
                self._gone.add(rank)
            else:
                self._rows[rank][number] = rows
            self._heard.notify_all()
        if rows == NOTHING_MORE or number > self._num_steps:
            self._wake()

    def _ended(self, rank: int) -> None:
        """One that needs no step any more may end once the others don't, either: until then they can't go on without
        it."""
        if not (self._is_closed or (rank in self._gone and self._has_left)):
            self._on_lost(f"node {rank} of the group ended")
