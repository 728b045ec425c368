"""Adapters loaded and unloaded while the server runs, by vLLM's paths. For keys with the scope "admin"."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.access.gate import Gate
from tandem.router.http.http_io import read_body
from tandem.router.nodes.adapters import ServedAdapters
from tandem.router.requests.service import CompletionService

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter. `lora_path` is a folder that every node can read."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False  # in place of the one that has the name


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None  # vLLM's; names suffice here


def add_adapter_routes(app: FastAPI, service: CompletionService, gate: Gate) -> None:
    limit = service.options.max_body_bytes

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /v1/load_lora_adapter")
        body = service.bodies.read(LoadAdapterBody, await read_body(request.scope, request.receive, limit))
        adapters = _enabled(service)
        name, facts = body.lora_name, await service.awaited_facts()
        if name in facts.names:
            raise InvalidRequestError(f"{name!r} is the model itself; choose another name", param="lora_name")
        if name in adapters.all() and not body.load_inplace:
            raise InvalidRequestError(
                f"{name!r} is loaded already; unload it first, or send load_inplace", param="lora_name"
            )
        nodes = [view.key for view in service.cluster.serving()]
        await adapters.load(name, body.lora_path, nodes, service.options.timeouts.load_adapter_s)
        return _said(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /v1/unload_lora_adapter")
        body = service.bodies.read(UnloadAdapterBody, await read_body(request.scope, request.receive, limit))
        await _enabled(service).unload(body.lora_name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _enabled(service: CompletionService) -> ServedAdapters:
    adapters = service.cluster.adapters
    if not adapters.is_enabled:
        raise InvalidRequestError("this server takes no adapters: start it with --enable-lora")
    return adapters


def _said(text: str) -> Response:
    return Response(text, media_type="text/plain")
