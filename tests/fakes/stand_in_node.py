"""A node without a model, for tests of the router: real control messages over ZMQ, tokens from a formula.

Token `output_index` of sample `sample_index` is a function of the original prompt, the sample and the index alone, so a
continued attempt must reproduce exactly what an undisturbed request would have got. Faults are switched on by setting
attributes from the test's thread.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from waiting import PATIENCE_S

from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.operate import Drain, NodeMoment, Story, TellStory
from tandem.engine.contracts.wire.parts import Message, NodeInfo, Role, TokenLogprobs
from tandem.engine.contracts.wire.profile import Profiled, StartProfile, StopProfile
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
    Tokens,
)

IDENTITY = ModelIdentity(config="c", weights="w", tokenizer="", rope="r", hash_block_size=16)


def stand_in_token(prompt: np.ndarray, sample_index: int, output_index: int, vocab_size: int) -> int:
    """The token that every stand-in node makes at this place; `prompt` is int32, without prior output."""
    seed = zlib.crc32(prompt.astype("<i4").tobytes())
    return zlib.crc32(b"%d/%d" % (sample_index, output_index), seed) % vocab_size


def stand_in_output(prompt: list[int], num_tokens: int, vocab_size: int, sample_index: int = 0) -> list[int]:
    ids = np.array(prompt, dtype=np.int32)
    return [stand_in_token(ids, sample_index, i, vocab_size) for i in range(num_tokens)]


def _logprobs(token_id: int, num_top: int | None, vocab_size: int) -> TokenLogprobs | None:
    if num_top is None:
        return None
    top = tuple((token_id + i) % vocab_size for i in range(num_top))
    values = tuple(-0.25 - 0.5 * i for i in range(num_top))
    return TokenLogprobs((token_id, *top), (-0.25 - (token_id % 7) / 8, *values), rank=1)


@dataclass
class _Running:
    peer: bytes
    submit: Submit
    prompt: np.ndarray
    next_index: dict[int, int]  # per unfinished sample
    last_index: int


@dataclass
class StandInNode:
    """`start()` serves in a thread until `stop()` (polite) or `die()` (the socket vanishes)."""

    role: Role = "unified"
    node_id: str = ""
    vocab_size: int = 400
    max_model_len: int = 512
    identity: ModelIdentity = IDENTITY
    version: str = ""
    wire_version: int = WIRE_VERSION
    port: int = 0
    step_s: float = 0.0  # time between two tokens of a request
    tokens_a_step: int = 1  # of a sample, as a node makes them whose guesses are right
    keys: ClusterKeys | None = None
    # faults and observations
    silent: bool = False  # hears nothing, says nothing, keeps the connection
    deaf_to_submit: bool = False  # answers pings but never a Submit
    deaf_to_profiles: bool = False
    deaf_to_drain: bool = False
    lose_first_submit: bool = False
    draining: bool = False
    repeat_deltas: bool = False  # each token message twice, and once more under the attempt before
    hold_tokens: bool = False  # accepts, computes nothing
    hold_after_tokens: int = -1  # holds them once it has made so many, until `go_on`
    die_after_tokens: int = -1  # vanishes once it has made this many tokens
    failures: list[RequestFailed] = field(default_factory=list)  # answers to the next Submits, ids filled in
    fail_after_tokens: int = -1  # RequestFailed (retryable) for every request that has made so many tokens here
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.node_id = self.node_id or f"{self.role}-{id(self):x}"
        self.running: dict[tuple[str, int], _Running] = {}
        self._answers: dict[tuple[str, int], Message] = {}  # to Submits that were answered
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.epoch = time.monotonic_ns()

    def start(self) -> StandInNode:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        if self.keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = self.keys.curve_keypair("server")
        self._socket.bind(f"tcp://127.0.0.1:{self.port or '*'}")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.address.rsplit(":", 1)[1])
        self._known: set[bytes] = set()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    die = stop

    def go_on(self) -> None:
        self.hold_after_tokens, self.hold_tokens = -1, False

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            version=self.version,
            control_address=self.address,
            identity=self.identity,
            model_name="stand-in",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )

    def status(self, sequence: int) -> Status:
        return Status(
            node_id=self.node_id,
            epoch=self.epoch,
            sequence=sequence,
            num_running=len(self.running),
            num_free_blocks=1000,
            num_blocks=1000,
            block_size=16,
            draining=self.draining,
            counters={"steps_read": float(self.num_tokens), "busy_s": 0.001 * self.num_tokens},
        )

    # --- the thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._take_turns()
        finally:  # an open socket would make the garbage collector wait for ever
            self._socket.close(linger=int(PATIENCE_S * 1000))  # what it said before its end, a busy machine sends late
            self._context.term()

    def _take_turns(self) -> None:
        next_step = 0.0
        while not self._stop.is_set():
            idle = not self.running or self.hold_tokens or self.silent
            wait_s = 0.02 if idle else max(0.0, min(0.02, next_step - time.monotonic()))
            if self._socket.poll(wait_s * 1000) and not self.silent:
                self._read()
            if self.running and not self.hold_tokens and not self.silent and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.step_s
                self._step()

    def _read(self) -> None:
        while True:
            try:
                peer, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(peer, codec.decode_to_node(payload))

    def _on_message(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
            if message.wire_version != self.wire_version:
                ours, theirs = str(self.wire_version), str(message.wire_version)
                return self._send(peer, Refused(field="wire_version", ours=ours, theirs=theirs))
            self._known.add(peer)
            self._send(peer, Welcome(info=self.info))
        elif peer not in self._known:
            self._send(peer, Refused(field="handshake", ours="Hello first", theirs=type(message).__name__))
        elif isinstance(message, Ping):
            self._send(peer, self.status(message.sequence))
        elif isinstance(message, Submit):
            self._on_submit(peer, message)
        elif isinstance(message, Cancel):
            self._on_cancel(peer, message)
        elif isinstance(message, StartProfile | StopProfile) and not self.deaf_to_profiles:
            self._send(peer, Profiled(ask=message.ask))
        elif isinstance(message, Drain) and not self.deaf_to_drain:
            self.draining = message.on
        elif isinstance(message, TellStory):
            told = [NodeMoment(name, 1, "chunk", 0.001, 0.0005, num_tokens=7) for name in message.request_ids]
            self._send(peer, Story(ask=message.ask, moments=tuple(told)))

    def _on_submit(self, peer: bytes, submit: Submit) -> None:
        key = submit.request_id, submit.attempt
        if key in self._answers:  # the first answer came later than `resend_s`
            return self._send(peer, self._answers[key])
        self.submits.append(submit)
        if self.deaf_to_submit:
            return
        if self.lose_first_submit:
            self.lose_first_submit = False
            return
        if self.failures:
            failure = self.failures.pop(0)
            self._answers[key] = msgspec.structs.replace(failure, request_id=key[0], attempt=key[1])
            return self._send(peer, self._answers[key])
        self._answers[key] = Accepted(request_id=key[0], attempt=key[1], num_cached_tokens=0)
        self._send(peer, self._answers[key])
        ids = np.frombuffer(submit.prompt_token_ids, dtype="<i4")
        prior = submit.num_prior_output_tokens
        if submit.sampling.num_prompt_logprobs is not None:
            entries = [_logprobs(int(t), submit.sampling.num_prompt_logprobs, self.vocab_size) for t in ids[1:]]
            self._send(peer, PromptLogprobs(request_id=key[0], attempt=key[1], entries=tuple(e for e in entries if e)))
        first = prior + (submit.mode == "decode")
        last = prior + 1 if submit.mode == "prefill" else submit.sampling.max_tokens
        if first < last:
            samples = dict.fromkeys(submit.sample_indices, first)
            self.running[key] = _Running(peer, submit, ids[: len(ids) - prior], samples, last)

    def _on_cancel(self, peer: bytes, cancel: Cancel) -> None:
        if cancel not in self.cancels:  # else the first answer came later than `resend_s`
            self.cancels.append(cancel)
        key = cancel.request_id, cancel.attempt
        if key in self.running:
            for sample in cancel.sample_indices or tuple(self.running[key].next_index):
                self.running[key].next_index.pop(sample, None)
            if not self.running[key].next_index:
                del self.running[key]
        self._send(peer, Cancelled(request_id=key[0], attempt=key[1], sample_indices=cancel.sample_indices))

    def _step(self) -> None:
        deltas: dict[bytes, list[TokenDelta]] = {}
        for key, running in list(self.running.items()):
            deltas.setdefault(running.peer, []).extend(self._advance(running))
            made = max(running.next_index.values(), default=0) - running.submit.num_prior_output_tokens
            if 0 <= self.fail_after_tokens <= made:
                self.running.pop(key, None)
                lost = RequestFailed(request_id=key[0], attempt=key[1], code="gone", message="gone", retryable=True)
                self._tokens(running.peer, deltas.pop(running.peer))
                self._send(running.peer, lost)
            elif not running.next_index:
                self.running.pop(key, None)  # a router that is gone takes its requests with it
        for peer, items in deltas.items():
            self._tokens(peer, items)
            if self.repeat_deltas:
                self._tokens(peer, items)
                self._tokens(peer, [msgspec.structs.replace(d, attempt=d.attempt - 1) for d in items])

    def _advance(self, running: _Running) -> list[TokenDelta]:
        submit, made = running.submit, []
        for sample, index in list(running.next_index.items()):
            tokens: list[int] = []
            stops = ends = False
            while not ends and len(tokens) < self.tokens_a_step and index + len(tokens) < running.last_index:
                tokens.append(stand_in_token(running.prompt, sample, index + len(tokens), self.vocab_size))
                stops = tokens[-1] in submit.sampling.stop_token_ids
                ends = stops or index + len(tokens) >= submit.sampling.max_tokens
                self.num_tokens += 1
                self.hold_tokens |= self.num_tokens == self.hold_after_tokens
            logprobs = [_logprobs(token, submit.sampling.num_logprobs, self.vocab_size) for token in tokens]
            made.append(
                TokenDelta(
                    submit.request_id,
                    submit.attempt,
                    sample,
                    index,
                    tuple(tokens),
                    finish_reason=("stop" if stops else "length") if ends else None,
                    stop_token_id=tokens[-1] if stops else None,
                    logprobs=tuple(entry for entry in logprobs if entry is not None) or None,
                )
            )
            running.next_index[sample] += len(tokens)
            if ends or running.next_index[sample] >= running.last_index:
                del running.next_index[sample]
            if 0 <= self.die_after_tokens <= self.num_tokens:
                self._stop.set()
        return made

    def _tokens(self, peer: bytes, deltas: list[TokenDelta]) -> None:
        self._send(peer, Tokens(deltas=tuple(deltas)))

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            self._socket.send_multipart([peer, codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:  # the router is gone
            for key in [key for key, running in self.running.items() if running.peer == peer]:
                del self.running[key]


@contextmanager
def stand_in_nodes(number: int, vocab_size: int) -> Iterator[list[StandInNode]]:
    """So many of them, n0 and on, until the context ends."""
    found = [StandInNode(vocab_size=vocab_size, node_id=f"n{index}").start() for index in range(number)]
    yield found
    for node in found:
        node.stop()
