"""A node without a model for `front.py`: it sends tokens as fast as it is told to, and costs little itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.model_folder import tokenizer_digest
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import Hello, Ping, Status, Welcome
from tandem.engine.contracts.wire.parts import Message, NodeInfo
from tandem.engine.contracts.wire.requests import Accepted, Cancel, Cancelled, Submit, TokenDelta, Tokens
from tandem.router.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo_model"
MAX_MODEL_LEN = 10_000_000


@dataclass(slots=True)
class Stream:
    """How far one request's tokens have been sent."""

    max_tokens: int
    num_tokens: int = 0


class StandInNode:
    """Every stream gets the same text, token by token, for ever: the first as soon as it is submitted, as if its prompt
    took no time, the others one a step."""

    def __init__(self, address: str, steps_per_s: float, node_id: str = "node") -> None:
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._step_s = 1 / steps_per_s
        self._token_ids = Tokenizer(MODEL).encode((MODEL / "README.md").read_text())
        self._running: dict[bytes, dict[tuple[str, int], Stream]] = {}  # per router
        identity = ModelIdentity(
            config="c", weights="w", tokenizer=tokenizer_digest(MODEL), rope="r", hash_block_size=64
        )
        self._info = NodeInfo(
            node_id=node_id,
            epoch=1,
            role="unified",
            identity=identity,
            model_name="demo",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=max(self._token_ids) + 1,
        )

    def serve(self) -> None:
        next_step = time.monotonic()
        while True:
            while self._socket.poll(max(0.0, 1000 * (next_step - time.monotonic()))):
                peer, payload = self._socket.recv_multipart()
                self._on_message(peer, codec.decode_to_node(payload))
            next_step = max(next_step + self._step_s, time.monotonic() - self._step_s)
            for peer, streams in self._running.items():
                if streams:
                    self._send(peer, Tokens(deltas=self._step(streams)))

    def _step(self, streams: dict[tuple[str, int], Stream]) -> tuple[TokenDelta, ...]:
        return tuple([self._next_token(streams, key) for key in list(streams)])

    def _next_token(self, streams: dict[tuple[str, int], Stream], key: tuple[str, int]) -> TokenDelta:
        ids, stream = self._token_ids, streams[key]
        index = stream.num_tokens
        stream.num_tokens = index + 1
        ends = stream.num_tokens == stream.max_tokens
        if ends:
            del streams[key]
        return TokenDelta(*key, 0, index, (ids[index % len(ids)],), "length" if ends else None)

    def _on_message(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._send(peer, Welcome(info=self._info))
        elif isinstance(message, Ping):
            self._send(peer, self._status(message.sequence))
        elif isinstance(message, Submit):
            self._send(peer, Accepted(request_id=message.request_id, attempt=message.attempt))
            key, streams = (message.request_id, message.attempt), self._running.setdefault(peer, {})
            streams[key] = Stream(message.sampling.max_tokens)
            self._send(peer, Tokens(deltas=(self._next_token(streams, key),)))
        elif isinstance(message, Cancel):
            self._running[peer].pop((message.request_id, message.attempt), None)
            self._send(peer, Cancelled(request_id=message.request_id, attempt=message.attempt))

    def _status(self, sequence: int) -> Status:
        num_running = sum(map(len, self._running.values()))
        return Status(
            node_id=self._info.node_id,
            epoch=1,
            sequence=sequence,
            num_running=num_running,
            num_blocks=1 << 20,
            num_free_blocks=1 << 20,
            block_size=64,
        )

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, codec.encode(message)])


def node_main(address: str, steps_per_s: float, node_id: str = "node") -> None:
    StandInNode(address, steps_per_s, node_id).serve()
