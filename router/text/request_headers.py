"""What a request's headers say about it: whose it is, how long it may take, and by which names logs know it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.parts import MAX_TARGET_MS, NO_TARGETS, Targets
from tandem.router.text.openai_api import LEAST_TIMEOUT_S

REQUEST_ID = b"x-request-id"
TARGETS = {
    b"x-ttft-target-ms": "ttft_s",
    b"x-tpot-target-ms": "tpot_s",
    b"x-itl-max-ms": "itl_max_s",
}
MAX_SESSION_BYTES = 256  # a guess: far above any name
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")  # W3C Trace Context, any version


@dataclass(slots=True)
class RequestHeaders:
    """What the headers of one request say, with defaults for what they leave out."""

    session: str = ""  # requests of one session go to the same nodes
    timeout_s: float = math.inf
    request_id: str = ""
    trace_id: str = ""
    traceparent: str = ""  # W3C Trace Context: the trace, and who asked within it
    tracestate: str = ""
    targets: Targets = NO_TARGETS

    def __str__(self) -> str:
        return f"request id {self.request_id}" + (f", trace {self.trace_id}" if self.trace_id else "")


def read_headers(headers: Iterable[tuple[bytes, bytes]], promised: Targets = NO_TARGETS) -> RequestHeaders:
    """What these headers say, whose names are in lower case as in ASGI; `promised`: the targets of those that bring
    none. The name of a session is cut off after MAX_SESSION_BYTES. Raises InvalidRequestError for an X-Request-Timeout
    or a target that is no such time."""
    found = RequestHeaders(targets=promised)
    for name, value in headers:
        if name == b"x-session-id":
            found.session = value[:MAX_SESSION_BYTES].decode("latin-1")
        elif name == REQUEST_ID:
            found.request_id = value.decode("latin-1")
        elif name == b"x-request-timeout":
            found.timeout_s = _seconds(value)
        elif name in TARGETS:
            found.targets = msgspec.structs.replace(found.targets, **{TARGETS[name]: _milliseconds(name, value) / 1e3})
        elif name == b"traceparent" and (trace := _TRACE.fullmatch(value)):
            found.trace_id, found.traceparent = trace[1].decode(), value.decode()
        elif name == b"tracestate":
            found.tracestate = value.decode("latin-1")
    return found


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds >= LEAST_TIMEOUT_S:
        raise InvalidRequestError(
            f"X-Request-Timeout is in seconds, from {LEAST_TIMEOUT_S} on", param="X-Request-Timeout"
        )
    return seconds


def _milliseconds(name: bytes, value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= MAX_TARGET_MS:
        shown = name.decode().title()
        raise InvalidRequestError(f"{shown} is in milliseconds, above 0 and up to {MAX_TARGET_MS:g}", param=shown)
    return milliseconds
