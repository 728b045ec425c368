"""Runs several worker processes behind one port: starts, watches, restarts and stops them.

Each worker listens through a SO_REUSEPORT socket of its own and has its own connections to the nodes. Workers report
through a pipe; a worker whose pipe breaks has lost its parent and drains. What they place they tell each other
(router/placing/siblings.py).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Protocol

from prometheus_client import multiprocess as prometheus_multiprocess

from tandem.engine.contracts.config import RouterOptions
from tandem.router.placing.siblings import Seat, make_seats
from tandem.router.process.port import bind
from tandem.router.process.shared_folder import shared_folder

logger = logging.getLogger(__name__)

RESTART_DELAY_S = 0.5  # a guess
START_S = 60.0  # of silence while a worker imports and connects; a guess
MAX_EARLY_DEATHS = 5  # workers that died before they served, in a row; a guess
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"


class WorkerMain(Protocol):
    """The main function of a worker process. It serves on `port` until its parent is gone or it is told to end."""

    def __call__(
        self,
        options: RouterOptions,
        port: int,
        router_id: str,
        seat: Seat,
        on_serving: Callable[[int], None],
        on_beat: Callable[[], None],
    ) -> None: ...


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    seat: Seat
    reports: Connection
    last_seen: float
    serving: bool = False


class WorkerGroup:
    """The worker processes of one router. `on_serving(port)` is called once, when a worker accepts connections: from
    then on the router is in use, and its silence counts."""

    def __init__(
        self,
        options: RouterOptions,
        worker_main: WorkerMain,
        on_serving: Callable[[int], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._options, self._worker_main, self._on_serving = options, worker_main, on_serving
        self._on_beat = on_beat
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._stopping = False
        self._announced = False
        self._early_deaths = 0
        self._silence_s = 4 * options.timeouts.peer_lost_s

    def run(self) -> int:
        """Runs until SIGTERM or SIGINT; the exit code is 0 unless workers can't be started."""
        # Bound, never listening: it keeps the port (port 0 included) while workers come and go.
        with (
            bind(self._options.host, self._options.port, share_port=True) as reservation,
            shared_folder() as folder,
            _environment(METRICS_DIR, str(folder)),
        ):
            self._port = reservation.getsockname()[1]
            seats = make_seats(folder / "placements", self._options.workers)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            self._workers = [self._start(seat) for seat in seats]
            while not self._stopping and self._early_deaths < MAX_EARLY_DEATHS:
                self._turn()
                self._on_beat()
            self._stop_all()
        return 0 if self._stopping else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _start(self, seat: Seat) -> _Worker:
        reader, writer = self._context.Pipe(duplex=False)
        router_id = f"router-{os.urandom(4).hex()}"
        process = self._context.Process(
            target=_child, args=(self._worker_main, self._options, self._port, router_id, seat, writer), daemon=False
        )
        process.start()
        writer.close()
        return _Worker(process, seat, reader, time.monotonic())

    def _turn(self) -> None:
        pipes = {worker.reports: worker for worker in self._workers}
        for pipe in wait(list(pipes), timeout=self._options.timeouts.heartbeat_s):
            worker = pipes[pipe]  # type: ignore[index]
            with contextlib.suppress(EOFError, OSError):
                worker.serving = worker.reports.recv() == "serving" or worker.serving
                worker.last_seen = time.monotonic()
        for index, worker in enumerate(self._workers):
            patience_s = self._silence_s if worker.serving else max(START_S, self._silence_s)
            if worker.process.exitcode is None and time.monotonic() - worker.last_seen > patience_s:
                logger.error("worker %d is silent and is killed", worker.process.pid)
                worker.process.kill()
                worker.process.join()
            if worker.process.exitcode is not None and not self._stopping:
                self._workers[index] = self._replace(worker)
        if not self._announced and any(worker.serving for worker in self._workers):
            self._announced = True
            self._early_deaths = 0
            self._on_serving(self._port)

    def _replace(self, dead: _Worker) -> _Worker:
        assert dead.process.pid is not None
        logger.error("worker %d ended with exit code %s; starting another", dead.process.pid, dead.process.exitcode)
        self._early_deaths = 0 if dead.serving else self._early_deaths + 1
        prometheus_multiprocess.mark_process_dead(dead.process.pid)
        dead.reports.close()
        time.sleep(RESTART_DELAY_S)
        return self._start(dead.seat)

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.process.terminate()
        end = time.monotonic() + self._options.timeouts.drain_s + 10
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.reports.close()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _child(
    worker_main: WorkerMain, options: RouterOptions, port: int, router_id: str, seat: Seat, reports: Connection
) -> None:
    def report(what: str) -> None:
        try:
            reports.send(what)
        except OSError:  # the parent is gone
            os.kill(os.getpid(), signal.SIGTERM)

    worker_main(options, port, router_id, seat, lambda _: report("serving"), lambda: report("beat"))
