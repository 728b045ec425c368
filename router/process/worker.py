"""One router process: builds the parts, serves until told to stop, drains."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.directory import DirectoryReader
from tandem.engine.contracts.errors import UnavailableError
from tandem.engine.contracts.generation_config import sampling_defaults
from tandem.engine.contracts.model_folder import resolve_model, tokenizer_digest
from tandem.engine.contracts.security import load_cluster_keys
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.version import version
from tandem.engine.process.watched import lasting_task, watched_task
from tandem.router.access.api_keys import ApiKeys
from tandem.router.access.gate import Gate
from tandem.router.access.limits import RequestLimits
from tandem.router.chat.chat import Chat
from tandem.router.http.app import make_app
from tandem.router.http.http_protocol import HttpLimits
from tandem.router.media.processor import MediaProcessor
from tandem.router.media.reader import MediaReader, parse_limits
from tandem.router.metrics.router_metrics import RouterMetrics
from tandem.router.nodes.adapters import parse_modules
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.discovery import NodeDiscovery
from tandem.router.placing.siblings import Seat, Siblings
from tandem.router.process.server import Server, max_connections
from tandem.router.requests.service import CompletionService
from tandem.router.text.privacy import Privacy
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.tracing.exporter import RequestTraces, checked_endpoint
from tandem.router.watching.desk import RequestDesk
from tandem.router.watching.feed import DashboardFeed

TICK_S = 0.1  # a guess: how late a deadline may be seen
CANCEL_GRACE_S = 2.0  # at the end, for nodes to hear the last cancels; a guess


@dataclass(frozen=True)
class Sources:
    """Where nodes and cached prefixes are learnt from, besides `RouterOptions.nodes`."""

    discovery: NodeDiscovery | None = None
    directory: DirectoryReader | None = None
    counters: Callable[[], dict[str, float]] = dict  # for /metrics
    limits: RequestLimits | None = None  # None: each process counts alone


class Worker:
    """One router process. `run` listens on a bound `sock`, and calls `on_beat` at every heartbeat."""

    def __init__(self, options: RouterOptions, router_id: str = "", seat: Seat | None = None) -> None:
        """Raises ConfigError for a folder, key file or secret that can't be used."""
        epoch = secrets.randbits(63) + 1
        self.info = NodeInfo(
            node_id=router_id or f"router-{secrets.token_hex(4)}",
            epoch=epoch,
            role="router",
            pid=os.getpid(),
            version=version(),
        )
        # Routers only connect; whether a control socket may leave loopback is decided where it is bound.
        self._cluster_keys = load_cluster_keys(options.cluster_secret_file, "127.0.0.1")
        parse_modules(options.lora)
        self._options, self._seat = options, seat
        self._api_keys = ApiKeys.of(options, self._cluster_keys.tenant_salt)
        folder = resolve_model(options.model.model, options.model.revision, with_weights=False)
        self._tokenizer, self._tokenizer_digest = Tokenizer(folder), tokenizer_digest(folder)
        self._chat = Chat(folder, self._tokenizer, options)
        self._media = MediaProcessor.of(folder, self._tokenizer)
        parse_limits(options.media.limit_mm_per_prompt)
        self.sampling_defaults = sampling_defaults(folder, options.generation_config)
        if options.otlp_traces_endpoint:
            checked_endpoint(options.otlp_traces_endpoint)
        self.service: CompletionService  # made by `run`, on its event loop
        self.feed: DashboardFeed  # likewise
        self._server: Server | None = None

    def stop(self) -> None:
        """Makes `run` stop accepting, finish running streams within `drain_s` and return. Safe to call from signal
        handlers and other threads."""
        if self._server is not None:
            self._server.should_exit = True

    async def run(
        self,
        sock: socket.socket,
        sources: Sources,
        on_serving: Callable[[int], None],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Serves until `stop`. `on_serving(port)` is called when connections are accepted."""
        siblings = Siblings(self._seat) if self._seat is not None else None
        self.service = service = self._make_service(sources, siblings)
        # Streams that outlive drain_s are ended by `_tick`, with an error event; uvicorn's own end is the last resort.
        last_resort_s = self._options.timeouts.drain_s + CANCEL_GRACE_S
        desk = RequestDesk(service, self._seat)
        await desk.exchange.open()
        endpoint = self._options.otlp_traces_endpoint
        traces = RequestTraces(endpoint, self.info.node_id, desk.told) if endpoint else None
        self.feed = DashboardFeed(desk)
        app = make_app(service, Gate(self._api_keys, sources.limits), self._chat, self.feed, traces)
        self._server = server = Server(app, last_resort_s, self._http_limits(), self._options.web)
        service.connect()
        tasks = [watched_task(self._tick(server, on_beat), "tick"), lasting_task(self.feed.run, "dashboard")]
        if sources.discovery is not None:
            tasks.append(lasting_task(partial(service.cluster.follow, sources.discovery), "discovery"))
        tasks.append(watched_task(_announce(server, sock.getsockname()[1], on_serving), "announce"))
        try:
            await server.serve(sockets=[sock])
            await self._finish()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if traces is not None:
                await traces.settle()
            desk.exchange.close()
            service.cluster.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)
            if siblings is not None:
                siblings.close()

    def _make_service(self, sources: Sources, siblings: Siblings | None) -> CompletionService:
        cluster = Cluster(
            self._options, self._cluster_keys, self.info, sources.directory, siblings, self._tokenizer_digest
        )
        metrics = RouterMetrics(
            lambda: cluster.views,
            lambda: {**cluster.counters(), **sources.counters()},
            lambda: "" if cluster.model.facts is None else cluster.model.facts.name,
        )
        return CompletionService(
            self._options,
            cluster,
            self._tokenizer,
            metrics,
            Privacy(self._tokenizer, self._api_keys.public_prefixes),
            self.sampling_defaults,
            MediaReader(self._media, self._options.media, self._options.max_body_bytes),
        )

    def _http_limits(self) -> HttpLimits:
        options = self._options
        most = options.max_connections or max_connections()
        return HttpLimits(most, options.http_header_s, options.http_body_s, options.http_keep_alive_s)

    async def _tick(self, server: Server, on_beat: Callable[[], None]) -> None:
        timeouts, next_beat, stopping_since = self._options.timeouts, 0.0, math.inf
        while True:
            now = time.monotonic()
            self.service.tick()
            if now >= next_beat:
                next_beat = now + timeouts.heartbeat_s
                self.service.metrics.note_figures()
                self._api_keys.reload()
                on_beat()
            if server.should_exit:
                self.feed.close()
            stopping_since = min(stopping_since, now) if server.should_exit else math.inf
            if now - stopping_since >= timeouts.drain_s:
                self.service.abort_all(UnavailableError("the router is shutting down"))
            await asyncio.sleep(min(TICK_S, timeouts.heartbeat_s / 2))

    async def _finish(self) -> None:
        """Cancels what was not finished, after the last connection, and gives nodes a moment to hear it."""
        self.service.abort_all(UnavailableError("the router is shutting down"))
        end = time.monotonic() + CANCEL_GRACE_S
        while self.service.num_active and time.monotonic() < end:
            await asyncio.sleep(0.02)


async def _announce(server: Server, port: int, on_serving: Callable[[int], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    on_serving(port)


def stop_on_signals(worker: Worker) -> None:
    """Makes SIGTERM and SIGINT drain the worker; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        worker.stop()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGINT, on_signal)
