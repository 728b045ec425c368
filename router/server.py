"""uvicorn, told three things more: faults below HTTP look like OpenAI's errors, a stuck client's connection can be
aborted, and a signal drains without ending the process by that signal."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.engine.errors import ConfigError, InvalidRequestError
from tandem.router.openai_api import error_body

BACKLOG = 2048


class HttpProtocol(HttpToolsProtocol):
    _in_message = False  # between a request's first byte and its last

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self.scope["extensions"] = {"tandem.transport": self.transport}  # type: ignore[dict-item]

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
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(patience_s),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the process's main installs its own handlers


def bind(host: str, port: int, share_port: bool) -> socket.socket:
    """A bound TCP socket, not yet listening. `share_port`: others may bind the same port (SO_REUSEPORT).

    Raises ConfigError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; choose another --port") from error
    sock.set_inheritable(True)
    return sock
