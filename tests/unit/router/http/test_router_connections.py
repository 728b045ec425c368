"""Clients that send nothing, or slowly, or end their side: what happens to their connections, over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_in_thread import FAST, RouterInThread, wait_until
from router_nodes import PROMPT, Nodes, addresses, output, stream_events
from waiting import PATIENCE_S

from tandem.engine.process.descriptors import descriptor_limit
from tandem.router.process.server import max_connections

QUICK = {"http_header_s": 0.4, "http_body_s": 0.4, "http_keep_alive_s": 1.0}


@contextmanager
def connected(router: RouterInThread) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), PATIENCE_S) as sock:
        yield sock


def received(sock: socket.socket) -> bytes:
    """Everything until the router ends the connection."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def request(version: str = "1.1", extra: str = "", **body: Any) -> bytes:
    content = json.dumps({"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: t\r\ncontent-length: {len(content)}\r\n{extra}\r\n"
    return head.encode() + content


@pytest.fixture
def router(folder: Path, nodes: Nodes) -> Iterator[RouterInThread]:
    with RouterInThread(folder, addresses(nodes.start()), **QUICK) as router:
        yield router.wait_ready()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"POST /v1/compl", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nhost: t\r\nx-slow: ", b"HTTP/1.1 408 "),
        (request()[:-1], b"HTTP/1.1 408 "),
        (request().partition(b"\r\n\r\n")[0] + b"\r\n\r\n", b"HTTP/1.1 408 "),
        (request().replace(b"/v1/completions", b"/no/such/path")[:-1], b"HTTP/1.1 404 "),
        (b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n", b"HTTP/1.1 200 "),
        (b"GET /health HTTP/1.1\r\nhost: t\r\n\r\nGET /hea", b"HTTP/1.1 200 "),
        (b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n\r\n", b"HTTP/1.1 200 "),
    ],
)
def test_a_connection_without_a_whole_request_ends(router: RouterInThread, sent: bytes, status: bytes) -> None:
    with connected(router) as sock:
        sock.sendall(sent)
        assert received(sock).startswith(status)


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nhost: t\r\nx-slow: ", request()[:-200]])
def test_a_byte_now_and_then_does_not_keep_a_connection(router: RouterInThread, sent: bytes) -> None:
    with connected(router) as sock:
        sock.sendall(sent)
        sock.settimeout(0.05)
        said = b""
        for _ in range(1000):
            try:
                sock.sendall(b" ")
                said += sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if said:
                break
        assert said.startswith(b"HTTP/1.1 408 ") or not said  # a reset may overtake the answer
        sock.settimeout(PATIENCE_S)
        received(sock)


def test_a_request_that_is_computed_for_long_is_not_cut_off(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.1)
    with RouterInThread(folder, addresses(node), **QUICK) as router:
        router.wait_ready()
        with connected(router) as sock:
            sock.sendall(request(max_tokens=15))
            answer = received(sock)
        assert b"HTTP/1.1 200 " in answer
        assert json.loads(answer[answer.index(b"{") :])["choices"][0]["token_ids"] == output(15)


def test_a_request_behind_another_may_wait_for_it(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.1)
    with RouterInThread(folder, addresses(node), **QUICK) as router:
        router.wait_ready()
        with connected(router) as sock:
            sock.sendall(request(max_tokens=15) + request(max_tokens=2))
            assert received(sock).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_ends_its_side_gets_its_answer(folder: Path, nodes: Nodes, stream: bool, version: str) -> None:
    node = nodes.start(step_s=0.05)
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        with connected(router) as sock:
            sock.sendall(request(version, max_tokens=12, stream=stream))
            sock.shutdown(socket.SHUT_WR)
            answer = received(sock)
        interim, _, rest = answer.partition(b"HTTP/1.1 200 ")
        assert interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
        assert rest.count(b"data: [DONE]") == stream
        assert (b'"finish_reason":"length"' in rest) is True
        assert not node.cancels


def test_requests_sent_at_once_are_all_answered_after_the_end(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.02)
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        with connected(router) as sock:
            sock.sendall(request(max_tokens=4) + request(max_tokens=5) + request(max_tokens=6))
            sock.shutdown(socket.SHUT_WR)
            assert received(sock).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_altogether_is_noticed(folder: Path, nodes: Nodes, stream: bool) -> None:
    node = nodes.start(hold_tokens=True)
    with RouterInThread(folder, addresses(node), timeouts=replace(FAST, request_s=600.0)) as router:
        router.wait_ready()
        with connected(router) as sock:
            sock.sendall(request(max_tokens=100, stream=stream))
            wait_until(lambda: bool(node.submits), "the request")
        wait_until(lambda: bool(node.cancels), "the cancel")
        router.wait_idle()


def test_beyond_the_most_connections_the_next_is_told_so(folder: Path, nodes: Nodes, caplog) -> None:
    with RouterInThread(folder, addresses(nodes.start()), max_connections=4) as router:
        router.wait_ready()  # over one connection
        held = [
            socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), PATIENCE_S) for _ in range(3)
        ]
        wait_until(lambda: len(router.worker._server.server_state.connections) == 4, "all to be accepted")
        for _ in range(3):
            with connected(router) as sock:
                answer = received(sock)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in answer
        assert caplog.text.count("--max-connections") == 1
        assert stream_events(router.client, max_tokens=5) == (output(5), None), "who is connected is served"
        for sock in held:
            sock.close()
        wait_until(lambda: len(router.worker._server.server_state.connections) < 4, "the others to be gone")
        assert httpx.get(f"{router.url}/health", timeout=PATIENCE_S).status_code == 200


def test_nonsense_does_not_fill_the_log(router: RouterInThread, caplog) -> None:
    for _ in range(5):
        with connected(router) as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            assert received(sock).startswith(b"HTTP/1.1 400 ")
    assert caplog.text.count("Invalid HTTP request") <= 1


def test_clients_leave_descriptors_for_nodes() -> None:
    assert 8 <= max_connections() < descriptor_limit()
