"""uvicorn's HTTP protocol, with more: requests have deadlines, connections are limited in number, faults below HTTP
look like OpenAI's errors, a client may end its sending side and still gets its answer, and a stuck client's connection
can be aborted.

All of this holds before anybody is asked for a key, since whoever can connect may send nothing, or a byte now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.engine.contracts.errors import InvalidRequestError, TandemError, UnavailableError
from tandem.engine.process.process_log import RateLimited
from tandem.router.text.openai_api import error_body

repeated = RateLimited(logging.getLogger(__name__))

PROBE_S = 0.25  # a guess: how often a client that ended its side is asked whether it is there at all
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestTimeoutError(InvalidRequestError):
    """A client began a request and did not finish sending it in time."""

    status, code = 408, "request_timeout"


@dataclass(frozen=True)
class HttpLimits:
    """Durations in seconds."""

    max_connections: int
    header_s: float = 20.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0


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
    """One connection of a client, from accept to close."""

    def __init__(self, limits: HttpLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._in_message = False  # between a request's first byte and its last
        self._has_headers = False  # of the request that is coming in
        self._overdue: asyncio.TimerHandle | None = None  # while the client owes us the rest of a request
        self._probe: asyncio.TimerHandle | None = None

    # --- how long a client may take ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            repeated.warning(
                "%d connections, which are all that there may be (--max-connections)", len(self.connections)
            )
            self._refuse(UnavailableError("the server has too many connections; try again later"))
            return
        self._expect_within(self._limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._overdue is None and not self._is_answering:  # whatever it is: a request must come of it
            self._expect_within(self._limits.header_s)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message, self._has_headers = True, False
        if self._overdue is None:
            self._expect_within(self._limits.header_s)
        self.scope["extensions"] = {"tandem.client": Client(self.transport, self.flow)}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._has_headers = True
        self._expect_within(self._limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False
        self._expect_nothing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_within(self, duration_s: float) -> None:
        """Sets the deadline in two halves. What came while this process itself stood still is read between them, so
        that no client is blamed for it."""
        self._expect_nothing()
        half_s = duration_s / 2
        self._overdue = self.loop.call_later(half_s, self._expect_second_half, half_s)

    def _expect_second_half(self, half_s: float) -> None:
        self._overdue = self.loop.call_later(half_s, self._on_overdue)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _on_overdue(self) -> None:
        self._overdue = None
        if self.transport.is_closing():
            return
        if self._is_answering and (self.pipeline or not self._has_headers):
            self._expect_within(
                self._limits.header_s
            )  # the one before is being answered, so that nobody reads this one
        elif not self._in_message or (self._has_headers and self.cycle.response_started):
            self.transport.close()
        else:
            what, limit_s = ("body", self._limits.body_s) if self._has_headers else ("head", self._limits.header_s)
            self._refuse(RequestTimeoutError(f"the {what} of the request was not complete within {limit_s:g} s"))

    # --- a client that ends its side --------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles the end of what the client sends. In the middle of a request it answers with an error and closes;
        after a whole request the answer is still sent."""
        cycle = self.cycle
        if self._in_message:
            answering = cycle is not None and cycle.response_started and not cycle.response_complete
            if not answering and not self.transport.is_closing():
                self.send_400_response("the request ended before it was complete")
            return False
        if not self._is_answering or self.transport.get_extra_info("sslcontext") is not None:
            return False  # TLS ends both sides at once
        last = self.pipeline[0][0] if self.pipeline else cycle
        last.keep_alive = False  # the connection closes with its answer
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        """Aborts the connection if the client has closed its socket altogether: its system then answers whatever is
        written with a reset. For that an interim response was written, which every client of HTTP/1.1 skips."""
        if self.transport.is_closing() or not self._is_answering:
            return
        if _has_failed(self.transport):
            self.transport.abort()
        else:
            self._probe = self.loop.call_later(PROBE_S, self._look_for_reset)

    # --- answers below HTTP -----------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError(msg))

    def _refuse(self, error: TandemError) -> None:
        body = error_body(error)
        again = b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % max(1, round(error.retry_after_s))
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            again,
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join(head) + body)
        self.transport.close()


def _has_failed(transport: asyncio.Transport) -> bool:
    """Whether the connection was reset since it was last looked at."""
    descriptor = transport.get_extra_info("socket").fileno()
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as view:
        try:
            return view.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        finally:
            view.detach()  # the descriptor belongs to the transport
    return True
