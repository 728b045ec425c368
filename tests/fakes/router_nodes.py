"""What tests of a router over stand-in nodes share: nodes that stop with the test, streams read to their end, wires."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread, make_tokenizer_folder

from stand_in_node import StandInNode, stand_in_output
from tandem.engine.contracts.wire.requests import RequestFailed

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
LONG = PROMPT * 8  # more than local_tail_tokens
GONE = RequestFailed(request_id="", attempt=0, code="node_failed", message="out of order", retryable=True)
FULL = RequestFailed(request_id="", attempt=0, code="overloaded", message="queue full", retryable=True)
NEVER = RequestFailed(request_id="", attempt=0, code="node_failed", message="can't ever", retryable=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def node() -> Iterator[StandInNode]:
    node = StandInNode(vocab_size=VOCAB_SIZE).start()
    yield node
    node.stop()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    for node in made.all:
        node.stop()


class Nodes:
    def __init__(self) -> None:
        self.all: list[StandInNode] = []

    def start(self, role: str = "unified", **settings: Any) -> StandInNode:
        node = StandInNode(role=role, vocab_size=VOCAB_SIZE, **settings).start()  # type: ignore[arg-type]
        self.all.append(node)
        return node


def addresses(*nodes: StandInNode) -> tuple[str, ...]:
    return tuple(node.address for node in nodes)


def stream_events(client: httpx.Client, **body: Any) -> tuple[list[int], dict[str, Any] | None]:
    """Token ids of choice 0 and the error event, if one ended the stream."""
    ids: list[int] = []
    fields = {"prompt": PROMPT, "stream": True, "return_token_ids": True, **body}
    with client.stream("POST", "/v1/completions", json=fields) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return ids, event["error"]
                ids += event["choices"][0]["token_ids"]
    return ids, None


def output(num_tokens: int, prompt: list[int] = PROMPT, sample: int = 0) -> list[int]:
    return stand_in_output(prompt, num_tokens, VOCAB_SIZE, sample)


class Wire:
    """Carries TCP to an address until `cut`, then again for new connections; nothing of the first `num_mute`."""

    def __init__(self, port: int, num_mute: int = 0) -> None:
        self._port, self._num_mute = port, num_mute
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._pairs.append((near, far))
            if len(self._pairs) <= self._num_mute:
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # its other end has gone before
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def status_of(router: RouterInThread, **body: Any) -> tuple[int, dict[str, Any], httpx.Headers]:
    response = router.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **body})
    return response.status_code, response.json().get("error", {}), response.headers
