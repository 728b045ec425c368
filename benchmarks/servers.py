"""What benchmarks do with servers that they start: wait until they serve, read their nodes' counters, end them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO
from urllib.request import urlopen

from tandem.deploy.bench.sse_client import HttpError, get_json
from tandem.deploy.launch.cluster_plan import PROGRAM, count_gpus
from tandem.deploy.redis_server import RedisServer, free_port
from tandem.router.metrics.nodes import read_nodes

READY_S, STOP_S = 240.0, 20.0
Ready = Callable[[], tuple[str, int]]  # waits until a server that was started is ready: its URL, the model's length
Log = int | IO[bytes]


async def until_ready(process: subprocess.Popen[bytes], url: str) -> int:
    """Waits until a server is ready and returns the model's length in tokens. Raises SystemExit when the process ends
    or takes too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; start it by hand to see why")
        with contextlib.suppress(OSError, HttpError, EOFError):
            await get_json(url, "/ready")
            return int((await get_json(url, "/v1/models"))["data"][0]["max_model_len"])
        await asyncio.sleep(0.2)
    raise SystemExit(f"the server was not ready after {READY_S:.0f} s")


@contextlib.contextmanager
def started_server(model: str, arguments: Sequence[str], log: Log = subprocess.DEVNULL) -> Iterator[Ready]:
    """`tandem serve`; stopped at the end."""
    port = free_port()
    command = [sys.executable, "-m", "tandem.deploy.cli", "serve", model, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        yield lambda: (url, asyncio.run(until_ready(process, url)))
    finally:
        stop([process])


@contextlib.contextmanager
def started_single_nodes(
    model: str, options: Sequence[str], placement: str, log: Log = subprocess.DEVNULL, num_nodes: int = 2
) -> Iterator[Ready]:
    """Single nodes and a router over them; one node a GPU where there are as many."""
    redis, port, num_gpus = RedisServer(), free_port(), count_gpus()
    redis.start()
    shared, path = ("--redis-url", redis.url), os.path.abspath(model)
    commands = [["unified", path, *shared, "--device-index", str(i % num_gpus if num_gpus else 0), *options]
                for i in range(num_nodes)]  # fmt: skip
    commands.append(["router", path, *shared, "--placement", placement, "--workers", "1", "--port", str(port)])
    children = [subprocess.Popen([sys.executable, "-c", PROGRAM, *command], stderr=log) for command in commands]
    url = f"http://127.0.0.1:{port}"

    def ready() -> tuple[str, int]:
        length = asyncio.run(until_ready(children[-1], url))
        while len(json.loads(urlopen(f"{url}/ready").read())["nodes"]) < num_nodes:
            time.sleep(0.1)
        return url, length

    try:
        yield ready
    finally:
        stop(children)
        redis.stop()


@contextlib.contextmanager
def two_single_nodes(model: str, options: Sequence[str], placement: str) -> Iterator[tuple[str, int]]:
    """(URL of a router over two single nodes, the model's length), when they are ready."""
    with started_single_nodes(model, options, placement) as ready:
        yield ready()


def node_counters(url: str) -> dict[str, float]:
    """The counters of all nodes together, by name."""
    text = urlopen(f"{url}/metrics", timeout=5).read().decode()
    totals: dict[str, float] = {}
    for node in read_nodes(text).values():
        for name, value in node.figures.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends all at once; whoever does not drain in time is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
