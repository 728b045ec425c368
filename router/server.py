"""uvicorn, told three things more: faults below HTTP look like OpenAI's errors, a stuck client's connection can be
aborted, and a signal drains without ending the process by that signal."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.engine.errors import InvalidRequestError
from tandem.router.openai_api import error_body

BACKLOG = 2048


class Client:
    """What an endpoint may do with its client's connection past ASGI."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow

    @property
    def is_leaving(self) -> bool:
        """True from the moment at which nothing more can be written, which is before `http.disconnect` arrives."""
        return self._transport.is_closing()

    def write_chunk(self, body: bytes) -> bool:
        """Writes a part of a response that was started without a length. False: the client must read first, or is
        leaving. Each call is a system call."""
        if self._flow.write_paused or self._transport.is_closing():
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def abort(self) -> None:
        """Closes the connection without waiting for the client to read what was written."""
        self._transport.abort()


class HttpProtocol(HttpToolsProtocol):
    _in_message = False  # between a request's first byte and its last

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self.scope["extensions"] = {"tandem.client": Client(self.transport, self.flow)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False

    def eof_received(self) -> None:
        """The client ended its side. In the middle of a request: say so before closing."""
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if self._in_message and not answering and not self.transport.is_closing():
            self.send_400_response("the request ended before it was complete")

    def send_400_response(self, msg: str) -> None:
        body = error_body(InvalidRequestError(msg))
        head = [
            STATUS_LINE[400],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join(head) + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Set `should_exit` to stop accepting, finish what runs within `patience_s`, and return from `serve`."""

    def __init__(self, app: ASGIApp, patience_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(patience_s),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the process's main installs its own handlers
