"""POST /v1/completions, straight on ASGI: the hot path of the router."""

from __future__ import annotations

import asyncio
import logging
import uuid

from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import ClientGoneError, TandemError
from tandem.engine.process.watched import log_only, watched_task
from tandem.router.http.explain import placement_headers, session_of
from tandem.router.http.http_io import JSON_TYPE, our_fault, read_body, send_error, send_whole, wait_for_disconnect
from tandem.router.http.http_protocol import Client
from tandem.router.http.listeners import Collector, EventStream
from tandem.router.requests.generation import Generation
from tandem.router.requests.service import CompletionService
from tandem.router.text.api_keys import ApiKeys
from tandem.router.text.completion import PromptPlan
from tandem.router.text.openai_api import CompletionBody

logger = logging.getLogger(__name__)

EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class CompletionsEndpoint:
    """An ASGI application for one path and method."""

    def __init__(self, service: CompletionService, keys: ApiKeys, max_body_bytes: int) -> None:
        self._service, self._keys, self._max_body_bytes = service, keys, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            await self._answer(scope, receive, send)
        except TandemError as error:
            status = error.status
            if not isinstance(error, ClientGoneError):
                await send_error(send, error)
        except Exception as error:
            if _client(scope).is_leaving:  # the transport says so a moment before `http.disconnect` does
                status = ClientGoneError.status
                return
            status = 500
            logger.error("a completion failed", exc_info=error)
            await send_error(send, our_fault())  # refused, and the connection closed, once a stream has begun
        finally:
            self._service.metrics.responses.labels(str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._keys.check(scope["headers"])
        raw = await read_body(scope, receive, self._max_body_bytes)
        body, plans = await self._service.plan(raw, tenant)
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        if body.stream:
            await self._stream(completion_id, body, plans, scope, receive, send)
        else:
            await self._collect(completion_id, body, plans, scope, receive, send)

    async def _collect(
        self,
        completion_id: str,
        body: CompletionBody,
        plans: list[PromptPlan],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        service, session = self._service, session_of(scope["headers"])
        collector = Collector(completion_id, body, plans, service.facts(), service.tokenizer)
        generations = collector.generations = service.start(completion_id, body, plans, collector, session)
        watcher = watched_task(wait_for_disconnect(receive), "client", log_only)
        watcher.add_done_callback(lambda _: service.abort(generations, _client_gone()))
        try:
            response = await collector.done
            headers = [JSON_TYPE, *placement_headers(generations)]
        finally:
            self._end(generations, watcher)
        await send_whole(send, 200, response, headers)

    async def _stream(
        self,
        completion_id: str,
        body: CompletionBody,
        plans: list[PromptPlan],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        service, client, session = self._service, _client(scope), session_of(scope["headers"])
        generations: list[Generation] = []

        def give_up_on_client() -> None:
            service.metrics.stuck_clients.inc()
            logger.warning("%s: the client does not read its stream; aborted", completion_id)
            service.abort(generations, ClientGoneError("the client stopped reading"))
            client.abort()

        stream = EventStream(
            completion_id,
            body,
            plans,
            service.facts(),
            service.tokenizer,
            client=client,
            limit=service.options.stream_queue,
            on_overflow=lambda: asyncio.get_running_loop().call_soon(give_up_on_client),
        )
        generations = stream.generations = service.start(completion_id, body, plans, stream, session)
        watcher = watched_task(wait_for_disconnect(receive), "client", log_only)
        watcher.add_done_callback(lambda _: service.abort(generations, _client_gone()))
        try:
            headers = placement_headers(generations)  # before there is something to write
            batch = await stream.next_batch()
            if len(headers) < len(generations):
                headers = placement_headers(generations)
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *headers]})
            stream.begun = True
            while batch:
                await send({"type": "http.response.body", "body": batch, "more_body": True})
                batch = await stream.next_batch()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end(generations, watcher)

    def _end(self, generations: list[Generation], watcher: asyncio.Future[None]) -> None:
        """Aborts whatever still runs. Generations and their listener know each other: left so, each request would
        stay until the garbage collector stops everybody's streams to look for it."""
        self._service.abort(generations, _client_gone())
        watcher.cancel()
        generations.clear()


def _client(scope: Scope) -> Client:
    client: Client = scope["extensions"]["tandem.client"]
    return client


def _client_gone() -> ClientGoneError:
    return ClientGoneError("the client closed the connection")
