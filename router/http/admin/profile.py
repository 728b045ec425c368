"""`POST /profile/start` and `/profile/stop`: every node profiles itself, and says what it found (docs/profiling.md)."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from tandem.engine.contracts.errors import UnavailableError
from tandem.engine.contracts.wire.profile import MAX_SECONDS, MAX_STEPS, Profiled, StartProfile, StopProfile
from tandem.router.access.gate import Gate
from tandem.router.http.http_io import read_body
from tandem.router.requests.service import CompletionService

# Guesses: torch's profiler takes seconds to start on a GPU, a large trace as long to write.
START_S, STOP_S = 30.0, 120.0


class ProfileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of serving is profiled: whichever bound is reached first."""

    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 5.0
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 32
    layers: bool = True

    def message(self, ask: str) -> StartProfile:
        return StartProfile(ask=ask, steps=self.steps, seconds=self.seconds, by_layer=self.layers)


def add_profile_routes(app: FastAPI, service: CompletionService, gate: Gate) -> None:
    @app.post("/profile/start")
    async def start(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /profile/start")
        raw = await read_body(request.scope, request.receive, service.options.max_body_bytes)
        wanted = service.bodies.read(ProfileBody, raw)
        return await _ask_all(service, wanted.message, START_S)

    @app.post("/profile/stop")
    async def stop(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /profile/stop")
        return await _ask_all(service, lambda ask: StopProfile(ask=ask), STOP_S)


async def _ask_all(
    service: CompletionService, make: Callable[[str], StartProfile | StopProfile], wait_s: float
) -> Response:
    """Asks every node that serves. Raises UnavailableError when there is none."""
    cluster = service.cluster
    nodes = [view.info for view in cluster.serving()]
    if not nodes:
        raise UnavailableError(f"no node to profile: {cluster.missing()}")
    ask = secrets.token_hex(8)
    message, keys = make(ask), [info.key for info in nodes if info.task == "generate"]
    found = await cluster.profiles.gather(keys, ask, lambda key: cluster.send(key, message, time.monotonic()), wait_s)
    answers = {key: found.get(key, Profiled(ask=ask, error=f"no answer within {wait_s:g} s")) for key in keys}
    unfit = Profiled(ask=ask, error="a model that pools has no steps to profile")
    lost = Profiled(ask=ask, error="the node is lost")
    shown = [_shown(info.node_id, info.role, answers.get(info.key, unfit) or lost) for info in nodes]
    return Response(msgspec.json.encode({"nodes": shown}), media_type="application/json")


def _shown(node_id: str, role: str, answer: Profiled) -> dict[str, Any]:
    found: dict[str, Any] = {"node_id": node_id, "role": role, "error": answer.error or None}
    if answer.report:
        found["report"] = msgspec.Raw(answer.report)
        found["trace"] = base64.b64encode(answer.trace).decode()
    return found
