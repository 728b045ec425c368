"""Whatever a router or the directory reads, fuzzed: a bad message is one error, and costs what it is about alone."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from mutations import json_cases, msgpack_cases
from router_in_thread import VOCAB_SIZE, RouterInThread
from router_nodes import PROMPT, Nodes, output, status_of, stream_events
from waiting import PATIENCE_S, wait_until

from stand_in_node import IDENTITY
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import DecodeError, InvalidRequestError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef, PrefixHint, TokenLogprobs
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    Migrate,
    Migrated,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
    Tokens,
)
from tandem.engine.contracts.wire.work import NodeReport
from tandem.kv_connector.directory.discovery import Discovery
from tandem.kv_connector.directory.mirror import Mirror
from tandem.kv_connector.directory.records import (
    Batch,
    NodeLeft,
    NodeRecord,
    NodeUp,
    TierChange,
    decode_event,
    decode_record,
)
from tandem.router.text.openai_api import CompletionBody, DetokenizeBody, TokenizeBody, parse_body, parse_prompts

FEW, MANY = 4_000, 100_000
NUMBERS = pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])

PEER = PeerRef("p", 7, "tcp://127.0.0.1:7")
INFO = NodeInfo(
    node_id="d",
    epoch=2,
    role="unified",
    control_address="tcp://127.0.0.1:9",
    identity=IDENTITY,
    model_name="m",
    max_model_len=512,
    vocab_size=VOCAB_SIZE,
    transports={"tcp": b"\x01"},
)
LOGPROBS = TokenLogprobs((1, 2), (-0.5, -1.0), 1)


def of_request(request_id: str = "r", attempt: int = 1) -> list[Any]:
    """What a node says about a request."""
    name = {"request_id": request_id, "attempt": attempt}
    delta = TokenDelta(request_id, attempt, 0, 0, (5,), None, None, (LOGPROBS,), 3)
    end = TokenDelta(request_id, attempt, 0, 1, (6,), "stop", 6)
    return [
        Accepted(**name, num_cached_tokens=3),
        Tokens(deltas=(delta, end)),
        PromptLogprobs(**name, entries=(LOGPROBS,)),
        RequestFailed(**name, code="gone", message="why", retryable=True),
        Cancelled(**name, sample_indices=(0,)),
        Migrated(**name, sample_index=0, successor=AttemptKey("s", 2), reason="x"),
    ]


FROM_NODE = [
    Welcome(info=INFO),
    Refused(field="f", ours="o", theirs="t"),
    Status(node_id="d", epoch=2, sequence=1, num_blocks=9, counters={"steps": 1.0}, fetch_s_per_token_from={"a": 1.0}),
    Status(node_id="d", epoch=2, sequence=2, num_blocks=9, work=NodeReport(1e-4, prompts=((-0.5, 9), (1.0, 4)))),
    *of_request(),
]
TO_NODE = [
    Hello(wire_version=WIRE_VERSION, info=INFO),
    Ping(sequence=1),
    Cancel(request_id="r", attempt=1),
    Submit(
        request_id="r",
        attempt=1,
        mode="prefill",
        prompt_token_ids=b"\x01\x00\x00\x00",
        sampling=SamplingParams(max_tokens=3),
        peer=PEER,
        prefix=PrefixHint(PEER, 16),
    ),
    Migrate(
        request_id="r", attempt=1, sample_index=0, peer=PEER, successor=AttemptKey("s", 1), num_tokens=3, deadline_s=1.0
    ),
]
RECORD = NodeRecord(node_id="d", epoch=2, role="decode", control_address="tcp://127.0.0.1:9")
CHANGES = (TierChange("gpu", b"\x01" * 32, b"\x02" * 16), TierChange("cpu", b"\x03" * 16))
EVENTS = [
    NodeUp(record=RECORD),
    NodeLeft(node_id="d", epoch=2),
    Batch(node_id="d", epoch=2, generation=1, sequence=1, reset=True, changes=CHANGES),
    Batch(node_id="d", epoch=2, generation=1, sequence=2, reset=False, changes=CHANGES),
]


@NUMBERS
@pytest.mark.parametrize(
    ("decode", "valid"),
    [
        (codec.decode_from_node, FROM_NODE),
        (codec.decode_to_node, TO_NODE),
        (decode_record, [RECORD]),
        (decode_event, EVENTS),
    ],
    ids=["from node", "to node", "record", "event"],
)
def test_a_message_is_read_or_raises_one_error(decode: Callable[[bytes], Any], valid: list[Any], number: int) -> None:
    for message in valid:
        assert decode(msgspec.msgpack.encode(message)) == message
    num_read = 0
    for data in msgpack_cases(random.Random(number), valid, number):
        with contextlib.suppress(DecodeError):
            decode(data)
            num_read += 1
    assert num_read > number // 100, "some of what is nearly right must get through, or this proves little"


BODIES: list[tuple[type, Any]] = [
    (
        CompletionBody,
        {
            "prompt": ["a", "é"], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "n": 2,
            "logit_bias": {"5": 1.5}, "stop": ["x"], "temperature": 0.5, "seed": -1, "logprobs": 2, "top_k": 4,
        },
    ),
    (CompletionBody, {"prompt": [[1, 2], [3]], "echo": True, "max_tokens": 0}),
    (TokenizeBody, {"prompt": "x", "add_special_tokens": False}),
    (DetokenizeBody, {"tokens": [1, 2]}),
]  # fmt: skip


@NUMBERS
@pytest.mark.parametrize(("kind", "valid"), BODIES)
def test_a_body_is_read_or_refused(kind: type, valid: dict[str, Any], number: int) -> None:
    num_read = 0
    for data in json_cases(random.Random(number), [valid], number):
        with contextlib.suppress(InvalidRequestError):
            body = parse_body(kind, data)
            num_read += 1
            if isinstance(body, CompletionBody):
                parse_prompts(body.prompt)
    assert num_read > number // 100


@NUMBERS
def test_what_a_stream_may_say_leaves_the_mirror_whole(number: int) -> None:
    mirror, discovery, num_applied = Mirror(max_entries=500), Discovery(grace_s=5.0), 0
    for turn, data in enumerate(msgpack_cases(random.Random(number), EVENTS, number)):
        try:
            event = decode_event(data)
        except DecodeError:
            continue
        try:
            if isinstance(event, NodeUp):
                changes = discovery.up(event.record, turn)
            elif isinstance(event, NodeLeft):
                changes = discovery.left(NodeKey(event.node_id, event.epoch))
            else:
                changes = []
                mirror.apply(event)
            for change in changes:
                if change.present:
                    mirror.adopt(change.record.owner)
                else:
                    mirror.drop(change.record.node_id)
        except ValueError:  # no whole number of hashes: the reader takes a snapshot
            mirror.distrust()
        num_applied += 1
        if num_applied % 50 == 0:
            mirror.check_integrity()
    mirror.check_integrity()
    assert num_applied > number // 20


class LyingNode:
    """Greets and answers heartbeats as it should; what it says besides is up to the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.submits: list[Submit] = []
        self.to_say: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        peer = b""
        while not self._stop.is_set():
            if self._socket.poll(10):
                peer, payload = self._socket.recv_multipart()
                message = codec.decode_to_node(payload)
                if isinstance(message, Hello):
                    self._say(peer, Welcome(info=INFO))
                elif isinstance(message, Ping):
                    self._say(peer, Status(node_id="d", epoch=2, sequence=message.sequence, num_free_blocks=9))
                elif isinstance(message, Submit):
                    self.submits.append(message)
            while self.to_say and peer:
                self._socket.send_multipart([peer, self.to_say.pop(0)])
        self._socket.close()
        self._context.term()

    def _say(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, codec.encode(message)])

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def liar() -> Iterator[LyingNode]:
    node = LyingNode()
    yield node
    node.end()


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 54))])
def test_whatever_a_node_says_each_request_ends_once(folder: Path, nodes: Nodes, liar: LyingNode, seed: int) -> None:
    rng = random.Random(seed)
    timeouts = Timeouts(heartbeat_s=0.05, peer_lost_s=1.0, connect_s=1.0, resend_s=0.1, request_s=3.0, drain_s=5.0)
    with RouterInThread(folder, (liar.address,), timeouts=timeouts) as router, ThreadPoolExecutor(4) as pool:
        router.wait_ready()
        asked = [pool.submit(status_of, router, max_tokens=8, n=count, logprobs=1) for count in (1, 1, 2, 3)]
        wait_until(lambda: len(liar.submits) >= 4, "the requests")
        about = [
            *FROM_NODE,
            *(part for submit in liar.submits for part in of_request(submit.request_id, submit.attempt)),
        ]
        liar.to_say += list(msgpack_cases(rng, about, 2_000))
        ends = [future.result(PATIENCE_S)[0] for future in asked]
        assert set(ends) <= {200, 429, 500, 502, 503, 504}
        wait_until(lambda: not liar.to_say, "the rest of what it says")
        liar.end()
        honest = nodes.start(identity=IDENTITY)
        router.call(lambda: router.worker.service.cluster.add(honest.address))

        def serves() -> bool:
            return status_of(router, prompt=PROMPT)[0] == 200

        wait_until(serves, "it to serve again")
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
        router.wait_idle()
