"""What operators do to nodes, and ask of requests: `/admin/…`, for keys with the scope "admin" (docs/operating.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError, UnavailableError
from tandem.engine.contracts.wire.operate import Drain, Lean
from tandem.engine.contracts.wire.work import Leaning, LeaningName
from tandem.router.access.gate import Gate
from tandem.router.http.http_io import read_body
from tandem.router.http.model_routes import READ, json_answer
from tandem.router.placing.leaning import wished
from tandem.router.placing.readiness import missing_roles
from tandem.router.placing.view import NodeView
from tandem.router.requests.service import CompletionService
from tandem.router.text.body_reader import BodyReader
from tandem.router.watching.desk import RequestDesk

ANSWER_S = 10.0  # how long a node has to say that it does what it was told; a guess
LOOK_S = 0.05  # how often that is looked at; a guess
MOST_NAME = 512  # characters of a request's name; a guess
NodeName = Annotated[str, Meta(min_length=1, max_length=256)]


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /admin/drain."""

    node: NodeName
    undo: bool = False  # it takes requests again


class RoleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /admin/role."""

    node: NodeName
    role: LeaningName


class NoSuchNodeError(InvalidRequestError):
    """A node that this router is not connected to."""

    status, code = 404, "node_not_found"


class NoSuchStoryError(InvalidRequestError):
    """A request that this router does not remember."""

    status, code = 404, "request_not_found"


class FixedRoleError(InvalidRequestError):
    """A node can't change its role."""

    status, code = 409, "role_is_fixed"


def add_operator_routes(app: FastAPI, service: CompletionService, gate: Gate, desk: RequestDesk) -> None:
    limit, bodies = service.options.max_body_bytes, BodyReader(is_strict=True)

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /admin/drain")
        body = bodies.read(DrainBody, await read_body(request.scope, request.receive, limit))
        return json_answer(await _drain(service, _node(service, body.node), not body.undo))

    @app.post("/admin/role")
    async def role(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "POST /admin/role")
        body = bodies.read(RoleBody, await read_body(request.scope, request.receive, limit))
        return json_answer(await _lean(service, _node(service, body.node), body.role))

    @app.api_route("/admin/requests", methods=READ)
    async def requests(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "GET /admin/requests")
        return json_answer(await desk.overview())

    @app.api_route("/admin/requests/{name:path}", methods=READ)
    async def story(name: str, request: Request) -> Response:
        gate.check_admin(request.headers.raw, "GET /admin/requests/…")
        if not name or len(name) > MOST_NAME:
            raise InvalidRequestError(f"the name of a request has 1 to {MOST_NAME} characters", param="name")
        found = await desk.stories(name)
        if not found:
            raise NoSuchStoryError(
                f"no request {name[:100]!r} is remembered: name the answer's id, or its X-Request-Id; the newest few "
                "hundred of each router process are kept",
                param="name",
            )
        return json_answer({"prompts": found})


def _node(service: CompletionService, name: str) -> NodeView:
    views = {view.info.node_id: view for view in service.cluster.views}
    if name not in views:
        known = ", ".join(sorted(views)[:20]) or "none"
        raise NoSuchNodeError(f"no node {name[:100]!r} is connected; those that are: {known}", param="node")
    return views[name]


async def _drain(service: CompletionService, view: NodeView, on: bool) -> dict[str, Any]:
    """Tells a node to drain, or to take requests again, and waits until it says so. Raises UnavailableError."""
    if not await _told(service, view, Drain(on=on), lambda: view.status.draining == on):
        why = "is lost" if view.lost else "has been told to end" if not on else "does not say so; is it older?"
        raise UnavailableError(f"{view.info.node_id} {why}, so it does not {'drain' if on else 'take requests again'}")
    missing = missing_roles(service.cluster.serving())
    return {
        "node": view.info.node_id,
        "role": view.role,
        "state": "draining" if on else "serving",
        "running": view.status.num_running,
        "waiting": view.status.num_waiting,
        "warning": f"nothing can be served now: {missing} takes requests" if missing else None,
    }


async def _lean(service: CompletionService, view: NodeView, role: LeaningName) -> dict[str, Any]:
    """Tells a node that does all work which kind of it comes first, and waits until it says so. Raises
    FixedRoleError, UnavailableError."""
    node = view.info.node_id
    if view.role != "unified" and view.role != role:
        raise FixedRoleError(
            f"{node} was started as a {view.role} node and stays one: drain it, end it, and start it again with "
            f"`tandem {role}`, or as a node that does all work (`tandem unified --leaning {view.role}`)",
            param="role",
        )
    if view.role == "unified" and not (role == "unified" or (service.cluster.is_elastic and view.outlook)):
        raise FixedRoleError(
            f"{node} does all work, and nothing here goes by what it is for first: start routers with --placement "
            "elastic and nodes with --tpot-target-ms (docs/elastic.md)",
            param="role",
        )
    if view.role == "unified" and (role != "unified" or view.status.leaning.is_pinned):
        wish = wished(role)
        if not await _told(service, view, Lean(leaning=wish), lambda: _leans(view.status.leaning, wish)):
            why = "is lost" if view.lost else "does not say so; is it older?"
            raise UnavailableError(f"{node} {why}, so it may be for {role} first, or not")
    said = view.status.leaning
    return {"node": node, "role": view.role, "leaning": view.leaning, "is_pinned": said.is_pinned, "why": said.why}


def _leans(said: Leaning, wish: Leaning) -> bool:
    return said.is_pinned == wish.is_pinned and (said.role == wish.role or not wish.is_pinned)


async def _told(service: CompletionService, view: NodeView, message: Drain | Lean, is_done: Callable[[], bool]) -> bool:
    """Tells a node until its status says that it is done. False: it didn't in time, or is lost."""
    end, next_ask = time.monotonic() + ANSWER_S, 0.0
    while not is_done():
        now = time.monotonic()
        if now >= end or view.lost:
            return False
        if now >= next_ask:
            service.cluster.send(view.key, message, now)
            next_ask = now + service.options.timeouts.resend_s
        await asyncio.sleep(LOOK_S)
    return True
