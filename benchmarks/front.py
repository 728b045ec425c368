"""What a streamed token costs a router process, beside what the web server under it costs for the same bytes.

A real router process; a stand-in node that sends, each step, one `Tokens` message with a token of every stream, as a
decode node does; clients that read sockets and count. Then the same clients against a bare Starlette application under
uvicorn that writes the same event to every stream each step. Tokens per CPU second of the serving process is what one
process can stream on a core of its own; with it, `kept up` must be 100 %: all that was offered arrived.

The first table is endless streams: the cost of a token. The second is short ones, each followed by the next: 512 prompt
token ids, 16 tokens; it adds what a request costs to be read, placed, submitted and ended.

    python benchmarks/front.py --streams 256 --steps-per-s 40
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import select
import socket
import time
from collections.abc import AsyncIterator, Callable
from ctypes import c_uint64
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from front_node import MAX_MODEL_LEN, MODEL, node_main
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tandem.deploy.redis_server import free_port
from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.router.process.main import run_router

SPAWN = multiprocessing.get_context("spawn")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BODY = {"prompt": "def read", "max_tokens": MAX_MODEL_LEN // 2, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT_TOKENS = 16
SHORT = {**BODY, "prompt": list(range(100, 612)), "max_tokens": SHORT_TOKENS}


# --- the servers --------------------------------------------------------------------------------------------


def router_main(port: int, node_address: str) -> None:
    run_router(RouterOptions(ModelOptions(str(MODEL)), port=port, workers=1, nodes=(node_address,)))


class BareStream:
    """Writes `event` to every client at once and each step, with nothing but the framework in between."""

    def __init__(self, event: bytes, steps_per_s: float) -> None:
        self._event, self._step_s = event, 1 / steps_per_s
        self._waiting: list[asyncio.Future[None]] = []
        self._ticker: asyncio.Task[None] | None = None

    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()
        if self._ticker is None:
            self._ticker = asyncio.ensure_future(self._tick())
        return StreamingResponse(self._events(body["max_tokens"]), media_type="text/event-stream")

    async def _tick(self) -> None:
        next_step = time.monotonic()
        while True:
            next_step = max(next_step + self._step_s, time.monotonic() - self._step_s)
            await asyncio.sleep(max(0.0, next_step - time.monotonic()))
            waiting, self._waiting = self._waiting, []
            for stream in waiting:
                if not stream.done():  # its client has left
                    stream.set_result(None)

    async def _events(self, max_tokens: int) -> AsyncIterator[bytes]:
        yield self._event
        for _ in range(max_tokens - 1):
            next_step = asyncio.get_running_loop().create_future()
            self._waiting.append(next_step)
            await next_step
            yield self._event


def bare_main(port: int, event: bytes, steps_per_s: float) -> None:
    routes = [Route("/v1/completions", BareStream(event, steps_per_s).complete, methods=["POST"])]
    uvicorn.run(
        Starlette(routes=routes), port=port, loop="uvloop", http="httptools", log_level="error", access_log=False
    )


class Counter(Protocol):
    """A number that the measuring process reads, too."""

    value: int


# --- the clients --------------------------------------------------------------------------------------------


def clients_main(port: int, num_streams: int, body: bytes, num_events: Counter, num_ended: Counter) -> None:
    """Opens all streams and counts events until it is terminated; where a stream ends, its connection asks again."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    request = head % len(body) + body
    poller, sockets = select.epoll(), {}
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sockets[sock.fileno()] = sock
        poller.register(sock.fileno(), select.EPOLLIN)
    while True:
        for fileno, _ in poller.poll():
            data = sockets[fileno].recv(1 << 16)
            if not data:
                raise EOFError("the server closed a connection")
            num_events.value += data.count(b'"text"')
            if data.endswith(b"0\r\n\r\n"):
                num_ended.value += 1
                sockets[fileno].sendall(request)


def one_event(port: int) -> bytes:
    """An event as the router writes it, from the middle of a stream."""
    body = json.dumps({**BODY, "max_tokens": 8}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head % len(body) + body)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    return b"data: " + answer.split(b"data: ")[4].split(b"\n\n")[0] + b"\n\n"


# --- measuring ----------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system time of a process, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def start(main: Callable[..., None], *arguments: object) -> SpawnProcess:
    process = SPAWN.Process(target=main, args=arguments, daemon=True)
    process.start()
    return process


def end(*processes: SpawnProcess) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(10)


def wait_for(port: int, path: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path.encode())
                if sock.recv(64).split()[1] in (b"200", b"404"):
                    return
        except ConnectionRefusedError:
            pass
        assert time.monotonic() < deadline, "the server did not get ready"
        time.sleep(0.1)


@dataclass(frozen=True)
class Rates:
    """What a server process did in the measured time."""

    tokens_per_s: float
    requests_per_s: float
    cpu_share: float  # CPU seconds of the server per second


def measure(server: SpawnProcess, port: int, body: dict[str, Any], args: argparse.Namespace) -> Rates:
    assert server.pid is not None
    num_events, num_ended = SPAWN.Value(c_uint64, lock=False), SPAWN.Value(c_uint64, lock=False)
    clients = start(clients_main, port, args.streams, json.dumps(body).encode(), num_events, num_ended)
    time.sleep(args.warm_up_s)
    events, ended, cpu, begin = num_events.value, num_ended.value, cpu_s(server.pid), time.monotonic()
    time.sleep(args.seconds)
    seconds = time.monotonic() - begin
    events, ended, cpu = num_events.value - events, num_ended.value - ended, cpu_s(server.pid) - cpu
    assert clients.is_alive(), "the clients failed"
    end(clients)
    return Rates(events / seconds, ended / seconds, cpu / seconds)


def report(ours: Rates, bare: Rates, offered: float, of_requests: bool) -> None:
    unit = "requests" if of_requests else "tokens"
    costs = []
    for name, rates in (("router", ours), ("bare Starlette", bare)):
        per_s = rates.requests_per_s if of_requests else rates.tokens_per_s
        costs.append(per_s / rates.cpu_share)
        kept_up = "" if of_requests else f", kept up {rates.tokens_per_s / offered:4.0%}"
        print(f"{name:>14}: {costs[-1]:8.0f} {unit} per CPU second, {per_s:8.0f} {unit}/s{kept_up}")
    print(f"{'ratio':>14}: {costs[0] / costs[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps-per-s", type=float, default=40)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm-up-s", type=float, default=3)
    args = parser.parse_args()
    node_address, offered = f"tcp://127.0.0.1:{free_port()}", args.streams * args.steps_per_s
    port = free_port()
    node, router = start(node_main, node_address, args.steps_per_s), start(router_main, port, node_address)
    wait_for(port, "/ready")
    event = one_event(port)
    ours = [measure(router, port, body, args) for body in (BODY, SHORT)]
    end(router, node)
    bare = start(bare_main, port, event, args.steps_per_s)
    wait_for(port, "/")
    theirs = [measure(bare, port, body, args) for body in (BODY, SHORT)]
    end(bare)
    print(f"{args.streams} streams, {args.steps_per_s:g} steps/s, events of {len(event)} bytes")
    report(ours[0], theirs[0], offered, of_requests=False)
    print(f"512 token ids in, {SHORT_TOKENS} out")
    report(ours[1], theirs[1], offered, of_requests=True)


if __name__ == "__main__":
    main()
