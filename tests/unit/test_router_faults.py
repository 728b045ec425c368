"""Nodes that die, fall silent, refuse or stammer; clients that leave or stop reading. Over real HTTP and ZMQ."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from router_in_thread import FAST, VOCAB_SIZE, RouterInThread, make_tokenizer_folder, wait_until

from stand_in_node import IDENTITY, StandInNode, stand_in_output
from tandem.engine.config import Timeouts
from tandem.engine.hashing import hash_blocks, root_hash
from tandem.engine.interfaces import BlockEvent
from tandem.engine.kv_layout import ModelIdentity
from tandem.engine.messages import RequestFailed
from tandem.engine.security import load_cluster_keys
from tandem.kv_connector.directory.in_process import InProcessDirectory
from tandem.router.worker import Sources

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
LONG = PROMPT * 8  # more than local_tail_tokens
GONE = RequestFailed(request_id="", attempt=0, code="node_failed", message="out of order", retryable=True)
FULL = RequestFailed(request_id="", attempt=0, code="overloaded", message="queue full", retryable=True)
NEVER = RequestFailed(request_id="", attempt=0, code="node_failed", message="can't ever", retryable=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


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


# --- attempts -------------------------------------------------------------------------------------------------


def test_another_node_continues_the_stream_of_one_that_died(folder: Path, nodes: Nodes) -> None:
    first = nodes.start(step_s=0.005, die_after_tokens=7)
    second = nodes.start(draining=True)
    with RouterInThread(folder, addresses(first, second)) as router:
        router.wait_ready()
        second.draining = False
        ids, error = stream_events(router.client, max_tokens=20)
        assert error is None
        assert ids == output(20), "every token once, in order, across the two attempts"
        assert [s.attempt for s in first.submits] == [1]
        assert {s.attempt for s in second.submits} == {2}
        assert second.submits[0].num_prior_output_tokens >= 6
        assert "tandem_router_retries_total 1.0" in router.client.get("/metrics").text
        router.wait_idle()


@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_the_death_of_either_half_is_survived(folder: Path, nodes: Nodes, dies: str) -> None:
    decode = [nodes.start("decode", step_s=0.005, node_id=f"d{i}") for i in range(2)]
    prefill = [nodes.start("prefill", node_id=f"p{i}", hold_tokens=dies == "prefill") for i in range(2)]
    with RouterInThread(folder, addresses(*decode, *prefill), local_tail_tokens=64) as router:
        router.wait_ready()
        wait_until(lambda: len(router.client.get("/ready").json()["nodes"]) == 4, "all nodes")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, prompt=LONG, max_tokens=40)
            victims = decode if dies == "decode" else prefill
            wait_until(lambda: any(node.submits for node in victims), "a submit")
            victim = next(node for node in victims if node.submits)
            if dies == "decode":
                wait_until(lambda: victim.num_tokens > 5, "some tokens")
            victim.die()
            for node in prefill:
                node.hold_tokens = False
            ids, error = result.result(10)
        assert (ids, error) == (output(40, LONG), None)
        router.wait_idle()


def test_samples_of_a_lost_node_continue_one_by_one(folder: Path, nodes: Nodes) -> None:
    first, second = nodes.start(step_s=0.005, die_after_tokens=13), nodes.start(draining=True)
    with RouterInThread(folder, addresses(first, second)) as router:
        router.wait_ready()
        second.draining = False
        body = {"prompt": PROMPT, "n": 3, "max_tokens": 12, "return_token_ids": True}
        answer = router.client.post("/v1/completions", json=body).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [output(12, sample=i) for i in range(3)]
        assert sorted(s.request_id.rsplit("-", 1)[1] for s in second.submits) == ["s0", "s1", "s2"]
        assert answer["usage"]["completion_tokens"] == 36


def test_silence_counts_as_loss_and_the_node_may_come_back(folder: Path, nodes: Nodes) -> None:
    first, second = nodes.start(step_s=0.01), nodes.start(draining=True)
    with RouterInThread(folder, addresses(first, second)) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=30)
            wait_until(lambda: first.num_tokens > 5, "some tokens")
            first.silent = True
            second.draining = False
            ids, error = result.result(10)
        assert (ids, error) == (output(30), None)
        first.silent = False  # goes on with its old attempt: late tokens are dropped
        wait_until(lambda: len(router.client.get("/ready").json()["nodes"]) == 2, "the first node's return")
        router.wait_idle()


class Wire:
    """Carries TCP to an address until `cut`, then again for new connections."""

    def __init__(self, port: int) -> None:
        self._port = port
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
                end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_broken_connection_to_a_living_node(folder: Path, nodes: Nodes) -> None:
    """Tokens on the way are lost with it, so the attempt is given up, cancelled when the node is back, and repeated."""
    node = nodes.start(step_s=0.01)
    wire = Wire(node.port)
    with RouterInThread(folder, (wire.address,)) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=30)
            wait_until(lambda: node.num_tokens > 5, "some tokens")
            wire.cut()
            assert result.result(10) == (output(30), None)
        assert {s.attempt for s in node.submits} == {1, 2}
        assert [c.attempt for c in node.cancels] == [1]
        router.wait_idle()
    wire.close()


def test_repeated_and_late_deltas_are_dropped(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(repeat_deltas=True, step_s=0.001)
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        assert stream_events(router.client, max_tokens=10) == (output(10), None)
        router.wait_idle()
        wait_until(lambda: "dropped_deltas_total 20.0" in router.client.get("/metrics").text, "the last repetitions")


def test_an_unanswered_submit_is_sent_again(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(lose_first_submit=True)
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert [s.attempt for s in node.submits] == [1, 1]


def test_a_node_that_never_accepts_is_given_up(folder: Path, nodes: Nodes) -> None:
    deaf, other = nodes.start(deaf_to_submit=True), nodes.start(draining=True)
    timeouts = Timeouts(heartbeat_s=0.05, peer_lost_s=0.5, connect_s=0.3, resend_s=0.1)
    with RouterInThread(folder, addresses(deaf, other), timeouts=timeouts) as router:
        router.wait_ready()
        other.draining = False
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert deaf.cancels
        router.wait_idle()


# --- honest ends ------------------------------------------------------------------------------------------------


def status_of(router: RouterInThread, **body: Any) -> tuple[int, dict[str, Any], httpx.Headers]:
    response = router.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **body})
    return response.status_code, response.json().get("error", {}), response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_are_statuses(folder: Path, nodes: Nodes, stream: bool) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node), max_attempts=2) as router:
        router.wait_ready()
        node.failures[:] = [NEVER]
        status, error, _ = status_of(router, stream=stream)
        assert (status, error["code"], error["message"]) == (502, "node_failed", "can't ever")
        node.failures[:] = [GONE]
        assert status_of(router)[0] == 200
        node.failures[:] = [FULL, FULL]
        status, error, headers = status_of(router, stream=stream)
        assert (status, error["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
        router.wait_idle()


def test_failures_after_the_first_token_are_events(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.002, fail_after_tokens=3)
    with RouterInThread(folder, addresses(node), max_attempts=2) as router:
        router.wait_ready()
        ids, error = stream_events(router.client, max_tokens=20)
        assert ids == output(6)  # two attempts of three tokens each
        assert error is not None
        assert (error["type"], error["code"]) == ("server_error", "node_failed")
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError):
            list(client.completions.create(model="stand-in", prompt="the fox", max_tokens=20, stream=True))
        client.close()
        status, error, _ = status_of(router, max_tokens=20)
        assert (status, error["code"]) == (502, "node_failed")


def test_no_node_is_503_and_the_router_says_what_is_missing(folder: Path, nodes: Nodes) -> None:
    prefill = nodes.start("prefill")
    with RouterInThread(folder, (*addresses(prefill), "tcp://127.0.0.1:1")) as router:
        assert status_of(router)[0] == 503  # nothing is known of the model yet, or soon no decode node
        wait_until(lambda: "prefill" in router.client.get("/ready").json()["error"]["message"], "the prefill node")
        start = time.monotonic()
        status, error, _ = status_of(router)
        assert (status, error["code"]) == (503, "unavailable")
        assert time.monotonic() - start >= FAST.connect_s
        assert router.client.get("/health").status_code == 200


def test_a_request_waits_for_a_node_that_comes_in_time(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(draining=True)
    with RouterInThread(folder, addresses(node)) as router:
        wait_until(lambda: router.worker.service.cluster.facts is not None, "the handshake")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(status_of, router)
            wait_until(lambda: router.worker.service.num_active == 1, "the request")
            node.draining = False
            assert result.result(5)[0] == 200


def test_too_many_without_a_node_is_429(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(draining=True)
    with RouterInThread(folder, addresses(node), max_queue=3) as router:
        wait_until(lambda: router.worker.service.cluster.facts is not None, "the handshake")
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(status_of, router) for _ in range(3)]
            wait_until(lambda: router.worker.service.num_active == 3, "three requests")
            status, error, headers = status_of(router)
            assert (status, error["code"]) == (429, "overloaded")
            assert int(headers["retry-after"]) >= 1
            assert [result.result(5)[0] for result in waiting] == [503] * 3


def test_the_deadline_of_a_request(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(hold_tokens=True)
    timeouts = Timeouts(heartbeat_s=0.05, peer_lost_s=0.5, connect_s=1.0, resend_s=0.1, request_s=0.4)
    with RouterInThread(folder, addresses(node), timeouts=timeouts) as router:
        router.wait_ready()
        status, error, _ = status_of(router)
        assert (status, error["type"]) == (504, "timeout")
        wait_until(lambda: bool(node.cancels), "the cancel")


# --- clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_on_every_node(folder: Path, nodes: Nodes, stream: bool) -> None:
    decode, prefill = nodes.start("decode", step_s=0.01), nodes.start("prefill")
    with RouterInThread(folder, addresses(decode, prefill), local_tail_tokens=64) as router:
        router.wait_ready()
        body = json.dumps({"prompt": LONG, "max_tokens": 150, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1]))) as sock:
            sock.sendall(head + body)
            wait_until(lambda: decode.num_tokens > 3, "some tokens")
        wait_until(lambda: bool(decode.cancels) and bool(prefill.cancels), "cancels on both nodes")
        router.wait_idle()
        assert not decode.running
        assert 'tandem_router_prompts_ended_total{outcome="client_gone"} 1.0' in router.client.get("/metrics").text


def test_a_client_that_stops_reading_is_aborted(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(max_model_len=100_000)
    with RouterInThread(folder, addresses(node), stream_queue=64) as router:
        router.wait_ready()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(router.url.rsplit(":", 1)[1])))
        body = json.dumps({"prompt": PROMPT, "max_tokens": 90_000, "stream": True, "logprobs": 20}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: bool(node.cancels), "the cancel", 15)
        assert node.num_tokens < 90_000
        router.wait_idle()
        assert "tandem_router_stuck_clients_total 1.0" in router.client.get("/metrics").text
        assert status_of(router)[0] == 200, "others are not disturbed"
        sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_fault_is_a_500_in_the_same_shape(folder: Path, nodes: Nodes, stream: bool) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        del router.worker.service.metrics.prompt_tokens  # start() trips over it
        response = router.client.post("/v1/completions", json={"prompt": PROMPT, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert 'tandem_router_responses_total{status="500"} 1.0' in router.client.get("/metrics").text
        router.wait_idle()


def test_api_keys(folder: Path, nodes: Nodes, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nsecret-one\nsecret-two\n")
    node = nodes.start()
    with RouterInThread(folder, addresses(node), api_keys_file=str(keys)) as router:
        router.wait_ready()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret-one"}):
            for path in ("/v1/completions", "/tokenize"):
                response = router.client.post(path, json={"prompt": "a"}, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret-two"}
        assert router.client.post("/v1/completions", json={"prompt": "a"}, headers=good).status_code == 200
        assert router.client.get("/v1/models", headers=good).status_code == 200
        assert router.client.get("/health").status_code == 200


# --- joining and leaving ----------------------------------------------------------------------------------------


def test_a_node_that_restarts_at_its_address_is_found_again(folder: Path, nodes: Nodes) -> None:
    first = nodes.start(node_id="n")
    with RouterInThread(folder, addresses(first)) as router:
        router.wait_ready()
        first.die()
        wait_until(lambda: router.client.get("/ready").status_code == 503, "the loss")
        second = nodes.start(node_id="n", port=first.port)
        router.wait_ready()
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert second.submits


def test_a_node_of_another_model_gets_nothing(folder: Path, nodes: Nodes) -> None:
    ours = nodes.start()
    with RouterInThread(folder, (ours.address, "tcp://127.0.0.1:1")) as router:
        router.wait_ready()
        other = nodes.start(identity=ModelIdentity(config="x", weights="x", tokenizer="x", rope="x"))
        router.call(lambda: router.worker.service.cluster.add(other.address))
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "the other node")
        assert all(status_of(router)[0] == 200 for _ in range(4))
        assert not other.submits


def test_an_unlisted_node_is_kept_while_it_can_be_reached(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        cluster = router.worker.service.cluster
        router.call(lambda: cluster.remove(node.address))
        assert status_of(router)[0] == 200
        node.die()
        wait_until(lambda: not cluster._links, "the node to be forgotten")


@dataclass(frozen=True)
class Change:
    address: str
    present: bool


class Found:
    """Discovery by hand: `changes` in order, then silence."""

    def __init__(self, *changes: Change) -> None:
        self._changes = changes

    async def watch(self) -> AsyncIterator[Change]:
        for change in self._changes:
            yield change
        await asyncio.Event().wait()


def test_discovered_nodes_and_the_directory_of_prefixes(folder: Path, nodes: Nodes) -> None:
    first, second, dead = nodes.start(), nodes.start(), "tcp://127.0.0.1:1"
    found = Found(Change(dead, True), Change(first.address, True), Change(dead, False), Change(second.address, True))
    directory = InProcessDirectory(second.node_id, second.epoch)
    hashes = hash_blocks(np.array(LONG, dtype=np.int32), 16, root_hash(IDENTITY.key(), b""))
    directory.publish([BlockEvent(block_hash, stored=True) for block_hash in hashes])
    with RouterInThread(folder, (), Sources(found, directory)) as router:
        wait_until(lambda: len(router.worker.service.cluster.views) == 2, "both nodes")
        assert set(router.worker.service.cluster._links) == {first.address, second.address}
        for _ in range(3):
            assert status_of(router, prompt=LONG)[0] == 200
        assert [len(second.submits), len(first.submits)] == [3, 0], "the node that holds the prefix is cheapest"


def test_encrypted_control_connections(folder: Path, nodes: Nodes, tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text("0123456789abcdef0123456789abcdef")
    other.write_text("another secret of enough length!")
    node = nodes.start(keys=load_cluster_keys(str(secret), "0.0.0.0"))
    with RouterInThread(folder, addresses(node), cluster_secret_file=str(secret)) as router:
        router.wait_ready()
        assert status_of(router)[0] == 200
    num_hellos = len(node.hellos)
    with RouterInThread(folder, addresses(node), cluster_secret_file=str(other)) as router:
        time.sleep(0.3)
        assert router.client.get("/ready").status_code == 503
    assert len(node.hellos) == num_hellos


def test_stopping_finishes_streams_and_takes_no_new_ones(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.01)
    router = RouterInThread(folder, addresses(node))
    with router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, httpx.Client(base_url=router.url), max_tokens=40)
            wait_until(lambda: node.num_tokens > 3, "some tokens")
            stopper = threading.Thread(target=router.worker.stop)
            stopper.start()
            time.sleep(0.2)
            with pytest.raises(httpx.ConnectError):
                httpx.post(f"{router.url}/v1/completions", json={"prompt": PROMPT})
            assert result.result(10) == (output(40), None)
        stopper.join()


def test_streams_that_outlive_the_drain_end_with_an_error(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(step_s=0.01)
    timeouts = Timeouts(heartbeat_s=0.05, peer_lost_s=0.5, connect_s=1.0, resend_s=0.1, drain_s=0.3)
    with RouterInThread(folder, addresses(node), timeouts=timeouts) as router, ThreadPoolExecutor(1) as pool:
        router.wait_ready()
        result = pool.submit(stream_events, httpx.Client(base_url=router.url), max_tokens=400)
        wait_until(lambda: node.num_tokens > 3, "some tokens")
        router.worker.stop()
        ids, error = result.result(10)
        assert error is not None
        assert (error["code"], ids) == ("unavailable", output(400)[: len(ids)])
        wait_until(lambda: bool(node.cancels), "the cancel")
