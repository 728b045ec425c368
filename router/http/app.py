"""The HTTP application: FastAPI for everything but the hot path, OpenAI's error shape for every fault."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import InvalidRequestError, TandemError, UnavailableError
from tandem.engine.process.version import version
from tandem.router.http.completions_endpoint import CompletionsEndpoint
from tandem.router.http.explain import add_explain_route
from tandem.router.http.http_io import error_headers, our_fault, read_body
from tandem.router.requests.service import CompletionService
from tandem.router.text.api_keys import ApiKeys
from tandem.router.text.completion import check_model, check_text
from tandem.router.text.openai_api import DetokenizeBody, TokenizeBody, error_body, parse_body

logger = logging.getLogger(__name__)


class _NotFoundError(InvalidRequestError):
    status, code = 404, "not_found"


class _MethodNotAllowedError(InvalidRequestError):
    status, code = 405, "method_not_allowed"


class App:
    """The hot path goes to its endpoint at once, everything else through FastAPI."""

    def __init__(self, completions: CompletionsEndpoint, rest: FastAPI) -> None:
        self._completions, self._rest = completions, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/completions" and scope["method"] == "POST":
            await self._completions(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


def make_app(service: CompletionService, keys: ApiKeys) -> App:
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None, openapi_url=None)
    limit = service.options.max_body_bytes
    started = int(time.time())
    completions = CompletionsEndpoint(service, keys, limit)
    # For every method that `App` does not send there itself: 405.
    app.router.routes.append(Route("/v1/completions", endpoint=completions, methods=["POST"]))
    _add_model_routes(app, service, keys, started)
    _add_tokenizer_routes(app, service, keys, limit)
    _add_state_routes(app, service)
    add_explain_route(app, service, keys, limit)
    _add_error_handlers(app)
    return App(completions, app)


def _add_model_routes(app: FastAPI, service: CompletionService, keys: ApiKeys, created: int) -> None:
    async def card() -> dict[str, Any]:
        facts = await service.awaited_facts()
        return {
            "id": facts.name,
            "object": "model",
            "created": created,
            "owned_by": "tandem",
            "max_model_len": facts.max_model_len,
        }

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        keys.check(request.headers.raw)
        return _json({"object": "list", "data": [await card()]})

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str, request: Request) -> Response:
        keys.check(request.headers.raw)
        check_model(model_id, await service.awaited_facts())
        return _json(await card())


def _add_tokenizer_routes(app: FastAPI, service: CompletionService, keys: ApiKeys, limit: int) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        keys.check(request.headers.raw)
        body = parse_body(TokenizeBody, raw := await read_body(request.scope, request.receive, limit))
        facts = await service.awaited_facts()
        check_model(body.model, facts)
        check_text(body.prompt, facts)

        def answer() -> Response:
            ids = service.tokenizer.encode(body.prompt, body.add_special_tokens)
            strings = [service.tokenizer.token_string(i) for i in ids] if body.return_token_strs else None
            count = {"count": len(ids), "max_model_len": facts.max_model_len}
            return _json({**count, "tokens": ids, "token_strs": strings})

        return await service.encoder.apart(len(raw), answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        keys.check(request.headers.raw)
        body = parse_body(DetokenizeBody, raw := await read_body(request.scope, request.receive, limit))
        facts = await service.awaited_facts()
        check_model(body.model, facts)
        if max(body.tokens, default=0) >= facts.vocab_size:
            raise InvalidRequestError(f"tokens holds ids beyond {facts.vocab_size - 1}", param="tokens")
        text = await service.encoder.apart(
            len(raw), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return _json({"prompt": text})


def _add_state_routes(app: FastAPI, service: CompletionService) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/version")
    async def get_version() -> Response:
        return _json({"version": version()})

    @app.get("/ready")
    async def ready() -> Response:
        if not service.cluster.ready:
            raise UnavailableError(f"not ready: {service.cluster.missing()}")
        nodes = [{"node_id": view.info.node_id, "role": view.info.role} for view in service.cluster.serving()]
        return _json({"status": "ready", "nodes": nodes})

    @app.get("/metrics")
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


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
