"""The HTTP application: FastAPI for everything but the hot path, OpenAI's error shape for every fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import InvalidRequestError, TandemError, UnavailableError
from tandem.engine.process.version import version
from tandem.router.access.gate import Gate
from tandem.router.chat.chat import Chat
from tandem.router.http.admin.adapter_routes import add_adapter_routes
from tandem.router.http.admin.dashboard import add_dashboard_routes
from tandem.router.http.admin.operate import add_operator_routes
from tandem.router.http.admin.profile import add_profile_routes
from tandem.router.http.around import with_request_id
from tandem.router.http.asked import chat_reader, completion_reader, responses_reader
from tandem.router.http.explain import add_explain_route
from tandem.router.http.generation_endpoint import GenerationEndpoint
from tandem.router.http.http_io import error_headers, our_fault
from tandem.router.http.model_routes import READ, add_model_routes, add_tokenizer_routes, json_answer
from tandem.router.http.openapi import description
from tandem.router.http.pooled import embeddings_reader, rerank_reader, score_reader
from tandem.router.http.status import add_status_route
from tandem.router.http.transcriptions import TRANSCRIPTS, transcription_reader
from tandem.router.requests.service import CompletionService
from tandem.router.text.openai_api import error_body
from tandem.router.tracing.exporter import RequestTraces
from tandem.router.watching.feed import DashboardFeed

logger = logging.getLogger(__name__)

DOCS_PAGE = Path(__file__).with_name("docs.html").read_bytes()
DOCS_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class _NotFoundError(InvalidRequestError):
    status, code = 404, "not_found"


class _MethodNotAllowedError(InvalidRequestError):
    status, code = 405, "method_not_allowed"


class App:
    """The hot paths go to their endpoints at once, everything else through FastAPI."""

    def __init__(self, endpoints: Mapping[str, GenerationEndpoint], rest: FastAPI) -> None:
        self._endpoints, self._rest = endpoints, rest

    @property
    def routes(self) -> list[BaseRoute]:
        return self._rest.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = with_request_id(scope, send)
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None and scope["method"] == "POST":
                await endpoint(scope, receive, send)
                return
        await self._rest(scope, receive, send)


def make_app(
    service: CompletionService, gate: Gate, chat: Chat, feed: DashboardFeed, traces: RequestTraces | None = None
) -> App:
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    limit = service.options.max_body_bytes
    readers = {
        "/v1/completions": completion_reader(service),
        "/v1/chat/completions": chat_reader(service, chat),
        "/v1/responses": responses_reader(service, chat),
        "/v1/embeddings": embeddings_reader(service),
        **dict.fromkeys(("/score", "/v1/score"), score_reader(service)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank_reader(service)),
    }
    endpoints = {path: GenerationEndpoint(service, gate, read, traces) for path, read in readers.items()}
    for path, task in TRANSCRIPTS.items():
        endpoints[path] = GenerationEndpoint(
            service, gate, transcription_reader(service, task), traces, takes_forms=True
        )
    for path, endpoint in endpoints.items():  # for every method that `App` does not send there itself: 405
        app.router.routes.append(Route(path, endpoint=endpoint, methods=["POST"]))
    add_model_routes(app, service, gate, int(time.time()))
    add_tokenizer_routes(app, service, gate, chat)
    _add_state_routes(app, service)
    add_adapter_routes(app, service, gate)
    add_explain_route(app, service, gate, limit)
    add_profile_routes(app, service, gate)
    add_status_route(app, service, gate, feed.desk)
    add_operator_routes(app, service, gate, feed.desk)
    add_dashboard_routes(app, gate, feed)
    _add_error_handlers(app)
    return App(endpoints, app)


def _add_state_routes(app: FastAPI, service: CompletionService) -> None:
    @app.api_route("/", methods=READ)
    async def root() -> Response:
        return json_answer({"server": "tandem", "version": version(), "api": "/v1", "description": "/docs"})

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.api_route("/ping", methods=[*READ, "POST"])
    async def ping() -> Response:
        return json_answer({"status": "ok"})

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> Response:
        return json_answer(description(service.options))

    @app.api_route("/docs", methods=READ)
    async def docs() -> Response:
        return Response(DOCS_PAGE, media_type="text/html", headers={"content-security-policy": DOCS_POLICY})

    @app.api_route("/version", methods=READ)
    async def get_version() -> Response:
        return json_answer({"version": version()})

    @app.api_route("/ready", methods=READ)
    async def ready() -> Response:
        if not service.cluster.ready:
            raise UnavailableError(f"not ready: {service.cluster.missing()}")
        nodes = [{"node_id": view.info.node_id, "role": view.info.role} for view in service.cluster.serving()]
        return json_answer({"status": "ready", "nodes": nodes})

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(TandemError)
    async def on_domain_error(_: Request, error: TandemError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return _error(_NotFoundError(f"no such path: {request.method} {request.url.path}"))
        if error.status_code == 405:
            wrong: TandemError = _MethodNotAllowedError(f"{request.url.path} does not take {request.method}")
            return _error(wrong, dict(error.headers or {}))
        return _error(InvalidRequestError(str(error.detail)))

    @app.exception_handler(Exception)
    async def on_our_fault(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(our_fault())


def _error(error: TandemError, extra: dict[str, str] | None = None) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)} | (extra or {})
    return Response(error_body(error), status_code=error.status, headers=headers)
