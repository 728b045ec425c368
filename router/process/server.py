"""uvicorn with our protocol, and without its handling of signals: here signals drain and don't end the process."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from tandem.engine.contracts.config import WebOptions
from tandem.engine.process.descriptors import descriptor_limit
from tandem.engine.process.process_log import RateLimitFilter
from tandem.router.http.around import around, tls_settings
from tandem.router.http.http_protocol import HttpLimits, HttpProtocol

BACKLOG = 2048  # a guess: connections that the system keeps while the loop is busy
# Of a process's descriptors: what it needs itself, and how much of the rest clients may have. Connections to nodes,
# which take about five each, and to Redis get what is left: 1,024 descriptors serve 720 clients and some 45 nodes.
OWN_DESCRIPTORS, CLIENTS_SHARE = 64, 0.75  # guesses

_limit_of_lines = RateLimitFilter()  # anybody who can connect makes uvicorn log "Invalid HTTP request received."


def max_connections() -> int:
    """How many clients may be connected, so that descriptors are left for nodes."""
    return max(8, int((descriptor_limit() - OWN_DESCRIPTORS) * CLIENTS_SHARE))


class Server(uvicorn.Server):
    """Set `should_exit` to stop accepting, finish what runs within `patience_s`, and return from `serve`."""

    def __init__(self, app: ASGIApp, patience_s: float, limits: HttpLimits, web: WebOptions) -> None:
        logging.getLogger("uvicorn.error").addFilter(_limit_of_lines)
        super().__init__(
            uvicorn.Config(
                around(app, web),
                http=functools.partial(HttpProtocol, limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=math.ceil(patience_s),
                **tls_settings(web),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the process's main installs its own handlers
