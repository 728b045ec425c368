"""The port that a router listens on."""

from __future__ import annotations

import socket

from tandem.engine.contracts.errors import ConfigError


def bind(host: str, port: int, share_port: bool) -> socket.socket:
    """A bound TCP socket, not yet listening. `share_port`: others may bind the same port (SO_REUSEPORT).

    As long as it doesn't listen it only keeps the port: others that bind it the same way may listen there. Raises
    ConfigError when the port is taken.
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
