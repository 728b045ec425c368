"""Host names in ZMQ addresses, looked up on threads of their own.

The system's resolver may take many seconds for a name that nobody knows, and ZMQ would ask it on the one thread that
moves the bytes of all its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

from tandem.engine.process.watched import log_only, watched_thread

Found = str | OSError


def needs_look_up(address: str) -> bool:
    """Whether the address has a host's name in it. False also for what is no address: ZMQ refuses that itself."""
    host = _host_of(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host)
    return False


def look_up(address: str, then: Callable[[Found], object], loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Looks the host up and calls `then` with the numeric address, or with the OSError that says why there is none. The
    call comes on `loop`, if that still runs, or without one on another thread, as late as the resolver answers."""

    def run() -> None:
        found = _numeric(address)
        if loop is None:
            then(found)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then, found)

    watched_thread(run, "look-up of a host name", on_failure=log_only).start()


def _numeric(address: str) -> Found:
    host = _host_of(address)
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return error
    except Exception as error:  # e.g. a name that can't be encoded
        return OSError(f"{host[:100]!r} is no host name: {error}")
    return f"tcp://{found[0][4][0]}:{address.rpartition(':')[2]}"


def _host_of(address: str) -> str:
    """The host in a TCP address; "" when the address isn't TCP with a host and a port, or its host is `*`."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or host == "*" or "\0" in host:
        return ""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
