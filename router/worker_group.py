"""Several worker processes behind one port: start, watch, restart, stop.

Each worker listens through a SO_REUSEPORT socket of its own and has its own connections to the nodes. Workers report
through a pipe; a worker whose pipe breaks has lost its parent and drains. What they place they tell each other
(siblings.py).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Protocol

from prometheus_client import multiprocess as prometheus_multiprocess

from tandem.engine.config import RouterOptions
from tandem.router.server import bind
from tandem.router.siblings import Seat, make_seats
from tandem.router.worker import LauncherBeat

logger = logging.getLogger(__name__)

RESTART_DELAY_S = 0.5
MAX_EARLY_DEATHS = 5  # workers that died before they served, in a row
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"


class WorkerMain(Protocol):
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
    """`on_serving(port)` is called once, when every worker accepts connections."""

    def __init__(self, options: RouterOptions, worker_main: WorkerMain, on_serving: Callable[[int], None]) -> None:
        self._options, self._worker_main, self._on_serving = options, worker_main, on_serving
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._stopping = False
        self._announced = False
        self._early_deaths = 0
        self._silence_s = 4 * options.timeouts.peer_lost_s

    def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit code is 0 unless workers can't be started."""
        # Bound, never listening: it keeps the port (port 0 included) while workers come and go.
        reservation = bind(self._options.host, self._options.port, share_port=True)
        self._port = reservation.getsockname()[1]
        shared_dir = tempfile.mkdtemp(prefix="tandem-router-")
        os.environ[METRICS_DIR] = shared_dir
        seats = make_seats(Path(shared_dir) / "placements", self._options.workers)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        beat = self._launcher_beat()
        try:
            self._workers = [self._start(seat) for seat in seats]
            while not self._stopping and self._early_deaths < MAX_EARLY_DEATHS:
                self._turn()
                beat()
            self._stop_all()
        finally:
            reservation.close()
            del os.environ[METRICS_DIR]
            shutil.rmtree(shared_dir, ignore_errors=True)
        return 0 if self._stopping else 1

    def _launcher_beat(self) -> Callable[[], None]:
        address = self._options.launcher_address
        return LauncherBeat(address, f"router-{os.getpid()}") if address else (lambda: None)

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
            if worker.process.exitcode is None and time.monotonic() - worker.last_seen > self._silence_s:
                logger.error("worker %d is silent and is killed", worker.process.pid)
                worker.process.kill()
                worker.process.join()
            if worker.process.exitcode is not None and not self._stopping:
                self._workers[index] = self._replace(worker)
        if not self._announced and all(worker.serving for worker in self._workers):
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


def _child(
    worker_main: WorkerMain, options: RouterOptions, port: int, router_id: str, seat: Seat, reports: Connection
) -> None:
    def report(what: str) -> None:
        try:
            reports.send(what)
        except OSError:  # the parent is gone
            os.kill(os.getpid(), signal.SIGTERM)

    worker_main(options, port, router_id, seat, lambda _: report("serving"), lambda: report("beat"))
