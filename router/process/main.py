"""Entry of the router: one process, or several that share the port."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.process.collector import settle
from tandem.engine.process.launcher_pipe import LauncherPipe
from tandem.engine.process.process_log import start_log
from tandem.engine.process.process_name import name_process
from tandem.router.placing.siblings import Seat
from tandem.router.process.port import bind
from tandem.router.process.said_by_one import SaidByOne
from tandem.router.process.sources import open_sources
from tandem.router.process.worker import Worker, stop_on_signals
from tandem.router.process.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

# The number of new objects that starts the garbage collector. Requests leave it nothing to do, and each of its rounds
# stops all streams for milliseconds.
YOUNG_OBJECTS = 50_000  # a guess; what requests leave: docs/measurements.md#one-router-process


def run_router(options: RouterOptions) -> int:
    """Serves until SIGTERM or SIGINT, drains, returns the exit code. Raises ConfigError before serving.

    When connections are accepted, `ready_fd` gets one line of JSON, `{"port": …}`, and then heartbeats.
    """
    start_log(options.log_level, options.log_format)
    name_process("router")
    launcher = LauncherPipe(options.ready_fd)
    options = replace(options, workers=options.workers or default_workers(os.cpu_count() or 1))

    def serving(port: int) -> None:
        scheme = "https" if options.web.ssl_certfile else "http"
        where = f"{scheme}://{options.host}:{port}"
        logger.info(
            "requests are taken on %s by %d process(es); %s/dashboard shows them", where, options.workers, where
        )
        launcher.ready(port=port)

    if options.workers > 1:
        _say_defaults(Worker(options), options)  # what can't be used is said here, once
        return WorkerGroup(options, run_worker, serving, launcher.beat).run()
    sock = bind(options.host, options.port, share_port=False)
    worker = Worker(options)
    _say_defaults(worker, options)
    _run(worker, options, sock, serving, launcher.beat)
    return 0


def _say_defaults(worker: Worker, options: RouterOptions) -> None:
    logger.info(
        "where a request doesn't say how to sample: %s (--generation-config %s)",
        worker.sampling_defaults,
        options.generation_config,
    )


def default_workers(num_cores: int) -> int:
    """The number of worker processes that suits a host. It is small, since one process streams tens of thousands of
    tokens a second, and nodes on the same host need most of the cores."""
    return max(1, min(8, num_cores // 4))


def run_worker(
    options: RouterOptions,
    port: int,
    router_id: str,
    seat: Seat,
    on_serving: Callable[[int], None],
    on_beat: Callable[[], None],
) -> None:
    """Runs one of several worker processes, with a listening socket of its own on the shared port."""
    start_log(options.log_level, options.log_format)
    say_once = SaidByOne(Path(seat.path).parent, seat.index)
    for handler in logging.getLogger().handlers:
        handler.addFilter(say_once)
    name_process(f"router {seat.index}")
    sock = bind(options.host, port, share_port=True)
    _run(Worker(options, router_id, seat), options, sock, on_serving, on_beat)


def _run(
    worker: Worker,
    options: RouterOptions,
    sock: socket.socket,
    on_serving: Callable[[int], None],
    on_beat: Callable[[], None],
) -> None:
    def serving(port: int) -> None:
        settle(YOUNG_OBJECTS)
        on_serving(port)

    async def serve() -> None:
        stop_on_signals(worker)
        async with open_sources(options) as sources:
            await worker.run(sock, sources, serving, on_beat)

    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
