"""`GET /dashboard`: a page without data, whose scripts ask `GET /admin/feed` for them (docs/dashboard.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.access.gate import Gate
from tandem.router.http.http_protocol import Client
from tandem.router.http.model_routes import READ
from tandem.router.watching.feed import DashboardFeed, Viewer

FOLDER = Path(__file__).parents[1] / "dashboard"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
# Scripts and styles of this folder alone, and no text that becomes markup: names of requests and nodes are others'.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class NoSuchFileError(InvalidRequestError):
    """A file that the dashboard doesn't have."""

    status, code = 404, "not_found"


def add_dashboard_routes(app: FastAPI, gate: Gate, feed: DashboardFeed) -> None:
    @app.api_route("/dashboard", methods=READ)
    async def page() -> Response:
        return _file("index.html")

    @app.api_route("/dashboard/{file}", methods=READ)
    async def part(file: str) -> Response:
        return _file(file)

    @app.get("/admin/feed")
    async def events(request: Request) -> Response:
        headers = request.headers.raw
        gate.check_admin(headers, "GET /admin/feed")
        client: Client = request.scope["extensions"]["tandem.client"]
        return _Feed(feed, feed.join(client.abort), lambda: gate.is_admin(headers))


class _Feed(StreamingResponse):
    """The events of one viewer, until it leaves, is dropped, or its key may no longer see them."""

    def __init__(self, feed: DashboardFeed, viewer: Viewer, may_see: Any) -> None:
        self._feed, self._viewer, self._may_see = feed, viewer, may_see
        super().__init__(self._events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _events(self) -> Any:
        async for event in self._viewer.events():
            if not self._may_see():
                return
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave(self._viewer)


def _file(name: str) -> Response:
    if name not in FILES:
        raise NoSuchFileError(f"the dashboard has no file {name[:100]!r}")
    return Response(FILES[name], media_type=TYPES[Path(name).suffix], headers=HEADERS)
