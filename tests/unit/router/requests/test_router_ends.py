"""Failures, deadlines, clients that leave or stop reading: each request has one honest end. Over HTTP and ZMQ."""

from __future__ import annotations

import gc
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from router_in_thread import FAST, RouterInThread
from router_nodes import (
    GONE,
    LONG,
    NEVER,
    PROMPT,
    Nodes,
    addresses,
    output,
    status_of,
    stream_events,
)
from waiting import PATIENCE_S, wait_until

from tandem.router.requests.generation import Generation


def test_an_ended_request_leaves_nothing_to_the_garbage_collector(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node)) as router:
        router.wait_ready()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert stream_events(router.client, max_tokens=5)[0] == output(5)
                assert status_of(router, max_tokens=5)[0] == 200
            router.wait_idle()
            wait_until(lambda: not any(type(each) is Generation for each in gc.get_objects()), "what was made")
        finally:
            gc.enable()


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
    prefill, timeouts = nodes.start("prefill"), replace(FAST, connect_s=1.0)
    with RouterInThread(folder, (*addresses(prefill), "tcp://127.0.0.1:1"), timeouts=timeouts) as router:
        assert status_of(router)[0] == 503  # nothing is known of the model yet, or soon no decode node
        wait_until(lambda: "prefill" in router.client.get("/ready").json()["error"]["message"], "the prefill node")
        start = time.monotonic()
        status, error, _ = status_of(router)
        assert (status, error["code"]) == (503, "unavailable")
        assert time.monotonic() - start >= timeouts.connect_s
        assert router.client.get("/health").status_code == 200


def test_a_request_that_comes_before_the_first_node_waits_for_it(folder: Path, nodes: Nodes) -> None:
    """A process that has just come to a shared port has not heard of its nodes yet."""
    node = nodes.start(silent=True)
    with RouterInThread(folder, addresses(node)) as router, ThreadPoolExecutor(2) as pool:
        early = pool.submit(status_of, router), pool.submit(router.client.get, "/v1/models")
        wait_until(lambda: router.worker.service.num_awaiting_facts == 2, "both requests")
        assert router.client.get("/health").status_code == 200
        node.silent = False
        assert early[0].result()[0] == 200
        assert early[1].result().status_code == 200
        assert router.worker.service.num_awaiting_facts == 0
        router.wait_idle()


def test_requests_before_the_first_node_are_no_more_than_may_wait(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(silent=True)
    with RouterInThread(folder, addresses(node), max_queue=1) as router, ThreadPoolExecutor(1) as pool:
        early = pool.submit(status_of, router)
        wait_until(lambda: router.worker.service.num_awaiting_facts == 1, "the request")
        assert status_of(router)[0] == 429
        node.silent = False
        assert early.result()[0] == 200


def test_a_request_waits_for_a_node_that_comes_in_time(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(draining=True)
    with RouterInThread(folder, addresses(node)) as router:
        wait_until(lambda: router.worker.service.cluster.model.facts is not None, "the handshake")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(status_of, router)
            wait_until(lambda: router.worker.service.num_active == 1, "the request")
            node.draining = False
            assert result.result(PATIENCE_S)[0] == 200


def test_too_many_without_a_node_is_429(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(draining=True)
    with RouterInThread(folder, addresses(node), max_queue=3) as router:
        wait_until(lambda: router.worker.service.cluster.model.facts is not None, "the handshake")
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(status_of, router) for _ in range(3)]
            wait_until(lambda: router.worker.service.num_active == 3, "three requests")
            status, error, headers = status_of(router)
            assert (status, error["code"]) == (429, "overloaded")
            assert int(headers["retry-after"]) >= 1
            node.draining = False
            assert [result.result(PATIENCE_S)[0] for result in waiting] == [200] * 3


def test_the_deadline_of_a_request(folder: Path, nodes: Nodes) -> None:
    node = nodes.start(hold_tokens=True)
    with RouterInThread(folder, addresses(node), timeouts=replace(FAST, request_s=0.4)) as router:
        router.wait_ready()
        status, error, _ = status_of(router)
        assert (status, error["type"]) == (504, "timeout")
        wait_until(lambda: bool(node.cancels), "the cancel")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_on_every_node(folder: Path, nodes: Nodes, stream: bool) -> None:
    decode, prefill = nodes.start("decode", step_s=0.01, hold_after_tokens=4), nodes.start("prefill")
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
        wait_until(lambda: bool(node.cancels), "the cancel")
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
        del router.worker.service.metrics.model.prompt_tokens  # start() trips over it
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
                assert response.headers["www-authenticate"] == "Bearer", "as HTTP has it"
        good = {"Authorization": "Bearer secret-two"}
        assert router.client.post("/v1/completions", json={"prompt": "a"}, headers=good).status_code == 200
        assert router.client.get("/v1/models", headers=good).status_code == 200
        assert router.client.get("/health").status_code == 200
