"""Paths that make tokens, straight on ASGI: the hot path of the router."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import ClientGoneError, TandemError
from tandem.engine.process.watched import log_only, watched_task
from tandem.router.access.gate import Gate
from tandem.router.access.limits import Permit
from tandem.router.http.asked import Asked, AskReader
from tandem.router.http.explain import placement_headers
from tandem.router.http.http_io import our_fault, read_body, send_error, send_whole, wait_for_disconnect
from tandem.router.http.http_protocol import Client
from tandem.router.http.listeners import Collector, EventStream
from tandem.router.requests.generation import Generation
from tandem.router.requests.request_log import HttpExchange, RequestLog
from tandem.router.requests.service import CompletionService
from tandem.router.text.request_headers import read_headers
from tandem.router.tracing.exporter import RequestTraces
from tandem.router.tracing.stages import stages_of

logger = logging.getLogger(__name__)

MAX_FORM_BYTES = 26 << 20  # OpenAI takes files of 25 MB
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationEndpoint:
    """An ASGI application for one path and method; `read` turns its bodies into completions. `takes_forms`: bodies are
    forms with files, which may be larger."""

    def __init__(
        self,
        service: CompletionService,
        gate: Gate,
        read: AskReader,
        traces: RequestTraces | None = None,
        takes_forms: bool = False,
    ) -> None:
        self._service, self._gate, self._read, self._takes_forms = service, gate, read, takes_forms
        self._limit = max(service.options.max_body_bytes, MAX_FORM_BYTES * takes_forms)
        self._log, self._traces = RequestLog(service.options), traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, exchange = 200, HttpExchange(scope["path"])
        try:
            await self._answer(scope, receive, send, exchange)
        except TandemError as error:
            status = error.status
            exchange.fail(error)
            if not isinstance(error, ClientGoneError):
                await send_error(send, error)
        except Exception as error:
            if _client(scope).is_leaving:  # the transport says so a moment before `http.disconnect` does
                status = ClientGoneError.status
                return
            status = 500
            logger.error("%s failed (%s)", scope["path"], read_headers(scope["headers"]), exc_info=error)
            await send_error(send, our_fault())  # refused, and the connection closed, once a stream has begun
        finally:
            self._service.metrics.responses.labels(str(status)).inc()
            self._log.write(exchange, status)
            if self._traces is not None:
                self._traces.write(exchange, status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: HttpExchange) -> None:
        permit = await self._gate.enter(scope["headers"])
        try:
            headers = read_headers(scope["headers"], permit.caller.tenant.targets)
            exchange.admit(permit, headers)
            raw = await read_body(scope, receive, self._limit, self._takes_forms)
            asked = await self._read(raw, permit.caller.tenant)
            exchange.name(asked.completion_id)
            if self._traces is not None:
                exchange.trace(self._service.facts_of(asked.body.model).name, [], [])
            logger.debug("%s: %s", asked.completion_id, headers)
            if asked.body.stream:
                await self._stream(asked, exchange, permit, _client(scope), receive, send)
            else:
                await self._collect(asked, exchange, permit, receive, send)
        finally:
            await self._gate.leave(permit)

    async def _collect(
        self, asked: Asked, exchange: HttpExchange, permit: Permit, receive: Receive, send: Send
    ) -> None:
        service = self._service
        collector = Collector(asked, service.tokenizer)
        generations = service.start(asked.completion_id, asked.body, asked.plans, collector, exchange.said)
        collector.follow(generations)
        watcher = watched_task(wait_for_disconnect(receive), "client", log_only)
        watcher.add_done_callback(lambda _: service.abort(generations, _client_gone()))
        try:
            response = await collector.done
            headers = [(b"content-type", asked.content_type), *self._placement(generations)]
        finally:
            self._end(generations, watcher, permit, exchange)
        await send_whole(send, 200, response, headers)

    async def _stream(
        self, asked: Asked, exchange: HttpExchange, permit: Permit, client: Client, receive: Receive, send: Send
    ) -> None:
        service = self._service
        generations: list[Generation] = []

        def give_up_on_client() -> None:
            service.metrics.stuck_clients.inc()
            logger.warning("%s: the client does not read its stream; aborted (%s)", asked.completion_id, exchange.said)
            service.abort(generations, ClientGoneError("the client stopped reading"))
            client.abort()

        stream = EventStream(
            asked,
            service.tokenizer,
            client=client,
            limit=service.options.stream_queue,
            on_overflow=lambda: asyncio.get_running_loop().call_soon(give_up_on_client),
        )
        generations = service.start(asked.completion_id, asked.body, asked.plans, stream, exchange.said)
        stream.follow(generations)
        watcher = watched_task(wait_for_disconnect(receive), "client", log_only)
        watcher.add_done_callback(lambda _: service.abort(generations, _client_gone()))
        try:
            headers = self._placement(generations)  # made before there is something to write
            batch = await stream.next_batch()
            if len(headers) < len(generations):
                headers = self._placement(generations)
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *headers]})
            stream.begin()
            while batch:
                await send({"type": "http.response.body", "body": batch, "more_body": True})
                batch = await stream.next_batch()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end(generations, watcher, permit, exchange)

    def _placement(self, generations: list[Generation]) -> list[tuple[bytes, bytes]]:
        return placement_headers(generations) if self._service.options.placement_header else []

    def _end(
        self, generations: list[Generation], watcher: asyncio.Future[None], permit: Permit, exchange: HttpExchange
    ) -> None:
        """Aborts whatever still runs, and counts what was used. It also cuts the cycle of generations and listener:
        only the garbage collector would free such a cycle, and each of its rounds stops all streams."""
        self._service.abort(generations, _client_gone())
        watcher.cancel()
        if self._log.is_on or self._traces is not None:
            exchange.count(generations, self._log.num_chars)
        if self._traces is not None:
            now = time.monotonic()
            stages = [list(stages_of(generation, now)) for generation in generations]
            exchange.trace(exchange.model, stages, [generation.story for generation in generations])
        permit.charge(sum(generation.num_tokens for generation in generations))
        generations.clear()


def _client(scope: Scope) -> Client:
    client: Client = scope["extensions"]["tandem.client"]
    return client


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection")
