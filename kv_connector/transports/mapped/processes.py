"""Knows when another process of this host has exited: pidfds, one watching thread a process, no polling interval.

A pidfd becomes readable when every thread of its process is gone; from then on none of its stores can land in memory
that we share with it. A stopped (SIGSTOP) process has not exited: it may store again when continued.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tandem.engine.contracts.errors import PeerLostError

logger = logging.getLogger(__name__)


def host_id() -> str:
    """A name of the host, equal for two processes exactly when they can name each other by pid on the same kernel."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process of this host. The start time (clock ticks since boot) tells it from a later one with its pid."""

    pid: int
    start_time: int

    @staticmethod
    def current() -> ProcessRef:
        return ProcessRef(os.getpid(), _start_time(os.getpid()))

    def open_pidfd(self) -> int:
        """A pidfd of exactly this process. Raises PeerLostError when it is gone, and OSError when this process has no
        descriptor left: a process that can't be watched must not be taken for one that can't write any more."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError as error:  # kernels differ in how they say that there is no such process
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise PeerLostError(f"process {self.pid} is gone: {error}") from error
        except OverflowError as error:  # no process can have this number
            raise PeerLostError(f"process {self.pid} is gone: {error}") from error
        try:
            # Read after the pidfd is held: from here on the pid can't be given to another process unnoticed.
            if _start_time(self.pid) != self.start_time:
                raise PeerLostError(f"process {self.pid} is gone: its pid belongs to another process now")
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd


def _start_time(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLostError(f"process {pid} is gone: {error.strerror}") from error
    fields_after_name = stat[stat.rindex(")") + 2 :].split()
    return int(fields_after_name[19])  # field 22 of proc(5)


@dataclass(eq=False)
class Watch:
    """One process being watched. `exited` is done when it is gone; cancelled when the watch ended before."""

    process: ProcessRef
    pidfd: int
    on_exit: Callable[[], None]
    exited: Future[None]


class ProcessWatcher:
    """Thread that waits for the exit of any number of processes. Callbacks run on it and must be short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}  # by pidfd
        self._poll = select.epoll()
        self._thread: threading.Thread | None = None

    def watch(self, process: ProcessRef, on_exit: Callable[[], None] = lambda: None) -> Watch:
        """Watches `process` and calls `on_exit` when it exits, before `Watch.exited` is done. Raises PeerLostError when
        it is gone already."""
        watch = Watch(process, process.open_pidfd(), on_exit, Future())
        with self._lock:
            self._watches[watch.pidfd] = watch
            self._poll.register(watch.pidfd, select.EPOLLIN)  # wakes a thread that is waiting already
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="process-watcher", daemon=True)
                self._thread.start()
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch; idempotent. Its callback won't run any more unless it has begun."""
        if self._remove(watch):
            watch.exited.cancel()

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def _remove(self, watch: Watch) -> bool:
        with self._lock:
            if self._watches.get(watch.pidfd) is not watch:
                return False
            del self._watches[watch.pidfd]
            self._poll.unregister(watch.pidfd)
            os.close(watch.pidfd)
            return True

    def _run(self) -> None:
        while True:
            for pidfd, _ in self._poll.poll():
                watch = self._watches.get(pidfd)
                if watch is not None and self._has_exited(watch) and self._remove(watch):
                    self._announce(watch)

    @staticmethod
    def _announce(watch: Watch) -> None:
        try:
            watch.on_exit()
        except Exception:
            logger.exception("cleaning up after process %d failed", watch.process.pid)
        watch.exited.set_result(None)

    @staticmethod
    def _has_exited(watch: Watch) -> bool:
        """Whether the process is gone, asked of its pidfd itself: the number of a closed pidfd may name a newer watch
        by the time its event is handled."""
        poll = select.poll()
        poll.register(watch.pidfd, select.POLLIN)
        return bool(poll.poll(0))


_watchers: dict[int, ProcessWatcher] = {}
_watchers_lock = threading.Lock()


def process_watcher() -> ProcessWatcher:
    """The one watcher of this process (a forked child gets its own: threads don't survive a fork)."""
    with _watchers_lock:
        if os.getpid() not in _watchers:
            _watchers[os.getpid()] = ProcessWatcher()
        return _watchers[os.getpid()]
