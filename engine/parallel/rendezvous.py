"""How processes of one host find each other: a store on a loopback port, and streams between all of them."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tandem.engine.contracts.errors import ConfigError

# Longer than a process may need to load weights and compile kernels; that one has ended is noticed at once; a guess.
STUCK_S = 600
LINK_S = 30.0  # how long one that has told where it listens may take to answer; a guess
RANK = struct.Struct("<i")
CREDENTIALS = struct.Struct("3i")  # process, user, group


def make_store(port: int = 0) -> Any:
    """A server in this process, on loopback only (left alone it listens everywhere); port 0: any. Raises ConfigError
    where the port is taken."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(f"port {port} can't be had, where processes of this host would meet: {error}") from error
    bound, timeout = listener.getsockname()[1], timedelta(seconds=STUCK_S)
    return dist.TCPStore("127.0.0.1", bound, None, True, timeout, False, master_listen_fd=listener.detach())  # type: ignore[attr-defined]


def find_store(port: int) -> Any:
    """The server of another process of this host, once it listens."""
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=STUCK_S))  # type: ignore[attr-defined]


def linked(rank: int, size: int, store: Any) -> dict[int, socket.socket]:
    """A collective of `size` processes of one user: a stream to each other one, by its rank. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "link"
        listener.bind(str(path))
        listener.listen(size)
        listener.settimeout(STUCK_S)
        store.set(f"link-{rank}", str(path))
        links: dict[int, socket.socket] = {}
        for peer in range(rank):
            links[peer] = _connected(bytes(store.get(f"link-{peer}")).decode(), rank)
        while len(links) < size - 1:
            link, peer = _accepted(listener)
            links[peer] = link
    return links


def gathered(store: Any, name: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """A collective that returns every process's value, in the order of ranks. A name serves once."""
    store.set(f"{name}-{rank}", value)
    return [bytes(store.get(f"{name}-{peer}")) for peer in range(size)]


def _connected(path: str, rank: int) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(LINK_S)
    link.connect(path)
    link.sendall(RANK.pack(rank))
    link.settimeout(None)
    return link


def _accepted(listener: socket.socket) -> tuple[socket.socket, int]:
    link, _ = listener.accept()
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if CREDENTIALS.unpack(credentials)[1] != os.getuid():
        link.close()
        raise PermissionError("another user's process wanted to be one of this group")
    link.settimeout(LINK_S)
    (peer,) = RANK.unpack(link.recv(RANK.size, socket.MSG_WAITALL))
    link.settimeout(None)
    return link, peer
