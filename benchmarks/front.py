"""What a streamed token costs a router process, beside what the web server under it costs for the same bytes.

A real router process; a stand-in node that sends, each step, one `Tokens` message with a token of every stream, as a
decode node does; clients that read sockets and count. Then the same clients against a bare Starlette application under
uvicorn that writes the same event to every stream each step. Tokens per CPU second of the serving process is what one
process can stream on a core of its own; with it, `kept up` must be 100 %: all that was offered arrived.

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
from ctypes import c_double, c_uint64
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tandem.engine import messages as wire
from tandem.engine.config import ModelOptions, RouterOptions
from tandem.engine.kv_layout import ModelIdentity
from tandem.engine.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Hello,
    NodeInfo,
    Ping,
    Status,
    Submit,
    TokenDelta,
    Tokens,
    Welcome,
)
from tandem.router.main import run_router
from tandem.router.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo_model"
SPAWN = multiprocessing.get_context("spawn")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
ENDLESS = 10_000_000
BODY = {"prompt": "def read", "max_tokens": ENDLESS // 2, "ignore_eos": True, "stream": True, "temperature": 0}


# --- the node -----------------------------------------------------------------------------------------------


class StandInNode:
    """Every stream gets the same text, token by token, for ever."""

    def __init__(self, address: str, steps_per_s: float) -> None:
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._step_s = 1 / steps_per_s
        self._token_ids = Tokenizer(MODEL).encode((MODEL / "README.md").read_text())
        self._running: dict[bytes, dict[tuple[str, int], int]] = {}  # per router: stream -> its next output_index
        identity = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r", hash_block_size=64)
        self._info = NodeInfo(
            node_id="node",
            epoch=1,
            role="unified",
            identity=identity,
            model_name="demo",
            max_model_len=ENDLESS,
            vocab_size=max(self._token_ids) + 1,
        )

    def serve(self) -> None:
        next_step = time.monotonic()
        while True:
            while self._socket.poll(max(0.0, 1000 * (next_step - time.monotonic()))):
                peer, payload = self._socket.recv_multipart()
                self._on_message(peer, wire.decode_to_node(payload))
            next_step = max(next_step + self._step_s, time.monotonic() - self._step_s)
            for peer, streams in self._running.items():
                self._socket.send_multipart([peer, wire.encode(Tokens(deltas=self._step(streams)))])

    def _step(self, streams: dict[tuple[str, int], int]) -> tuple[TokenDelta, ...]:
        ids, deltas = self._token_ids, []
        for stream, index in streams.items():
            deltas.append(TokenDelta(*stream, 0, index, (ids[index % len(ids)],)))
            streams[stream] = index + 1
        return tuple(deltas)

    def _on_message(self, peer: bytes, message: wire.Message) -> None:
        if isinstance(message, Hello):
            self._send(peer, Welcome(info=self._info))
        elif isinstance(message, Ping):
            self._send(peer, Status(node_id="node", epoch=1, sequence=message.sequence, num_blocks=1, block_size=64))
        elif isinstance(message, Submit):
            self._send(peer, Accepted(request_id=message.request_id, attempt=message.attempt))
            self._running.setdefault(peer, {})[message.request_id, message.attempt] = 0
        elif isinstance(message, Cancel):
            self._running[peer].pop((message.request_id, message.attempt), None)
            self._send(peer, Cancelled(request_id=message.request_id, attempt=message.attempt))

    def _send(self, peer: bytes, message: wire.Message) -> None:
        self._socket.send_multipart([peer, wire.encode(message)])


def node_main(address: str, steps_per_s: float) -> None:
    StandInNode(address, steps_per_s).serve()


# --- the servers --------------------------------------------------------------------------------------------


def router_main(port: int, node_address: str) -> None:
    run_router(RouterOptions(ModelOptions(str(MODEL)), port=port, workers=1, nodes=(node_address,)))


class BareStream:
    """Writes `event` to every client each step, with nothing but the framework in between."""

    def __init__(self, event: bytes, steps_per_s: float) -> None:
        self._event, self._step_s = event, 1 / steps_per_s
        self._next_step: asyncio.Future[None] | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def complete(self, request: Request) -> StreamingResponse:
        await request.json()
        if self._ticker is None:
            self._next_step = asyncio.get_running_loop().create_future()
            self._ticker = asyncio.ensure_future(self._tick())
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _tick(self) -> None:
        next_step = time.monotonic()
        while True:
            next_step = max(next_step + self._step_s, time.monotonic() - self._step_s)
            await asyncio.sleep(max(0.0, next_step - time.monotonic()))
            assert self._next_step is not None
            done, self._next_step = self._next_step, asyncio.get_running_loop().create_future()
            done.set_result(None)

    async def _events(self) -> AsyncIterator[bytes]:
        while True:
            assert self._next_step is not None
            await self._next_step
            yield self._event


def bare_main(port: int, event: bytes, steps_per_s: float) -> None:
    routes = [Route("/v1/completions", BareStream(event, steps_per_s).complete, methods=["POST"])]
    uvicorn.run(
        Starlette(routes=routes), port=port, loop="uvloop", http="httptools", log_level="error", access_log=False
    )


# --- the clients --------------------------------------------------------------------------------------------


def clients_main(port: int, num_streams: int, num_events: Synchronized[int], last_event: Synchronized[float]) -> None:
    """Opens all streams, then counts events until it is terminated. One event is left in a file for the other side."""
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    poller, sockets = select.epoll(), {}
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head % len(body) + body)
        sock.setblocking(False)
        sockets[sock.fileno()] = sock
        poller.register(sock.fileno(), select.EPOLLIN)
    count = 0
    while True:
        for fileno, _ in poller.poll():
            data = sockets[fileno].recv(1 << 16)
            if not data:
                raise EOFError("the server closed a stream")
            count += data.count(b"data: ")
        num_events.value, last_event.value = count, time.monotonic()


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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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


def measure(server: SpawnProcess, port: int, args: argparse.Namespace) -> tuple[float, float]:
    """(tokens per CPU second of the server, tokens per second)."""
    assert server.pid is not None
    num_events, last_event = SPAWN.Value(c_uint64, lock=False), SPAWN.Value(c_double, lock=False)
    clients = start(clients_main, port, args.streams, num_events, last_event)
    time.sleep(args.warm_up_s)
    events, cpu, begin = num_events.value, cpu_s(server.pid), time.monotonic()
    time.sleep(args.seconds)
    events, cpu, seconds = num_events.value - events, cpu_s(server.pid) - cpu, time.monotonic() - begin
    assert clients.is_alive(), "the clients failed"
    end(clients)
    return events / cpu, events / seconds


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
    ours = measure(router, port, args)
    end(router, node)
    bare = start(bare_main, port, event, args.steps_per_s)
    wait_for(port, "/")
    theirs = measure(bare, port, args)
    end(bare)
    print(f"{args.streams} streams, {args.steps_per_s:g} steps/s, events of {len(event)} bytes")
    for name, (per_cpu_s, per_s) in (("router", ours), ("bare Starlette", theirs)):
        print(
            f"{name:>14}: {per_cpu_s:8.0f} tokens per CPU second, {per_s:8.0f} tokens/s, kept up {per_s / offered:4.0%}"
        )
    print(f"{'ratio':>14}: {ours[0] / theirs[0]:.2f}")


if __name__ == "__main__":
    main()
