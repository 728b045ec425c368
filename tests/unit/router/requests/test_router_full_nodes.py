"""Nodes that take nothing now, because they are full or drain: requests wait at the router, so many and so long."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
from router_in_thread import FAST, RouterInThread
from router_nodes import FULL, PROMPT, Nodes, addresses, output, status_of, stream_events
from waiting import PATIENCE_S, wait_until

ALWAYS = 10_000
OVERFLOWED = msgspec.structs.replace(FULL, code="kv_overflow", message="too large for fp8")
DRAINING = msgspec.structs.replace(FULL, code="draining", message="the node is draining")


def test_a_request_waits_for_room(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node), max_attempts=1) as router:
        router.wait_ready()
        node.failures[:] = [FULL] * 3
        assert status_of(router)[0] == 200
        assert not node.failures
        router.wait_idle()


def test_a_request_that_overflows_fp8_asks_for_precise_kv_and_loses_no_attempt(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node), max_attempts=1) as router:
        router.wait_ready()
        node.failures[:] = [OVERFLOWED]
        assert status_of(router)[0] == 200
        assert [submit.is_precise for submit in node.submits] == [False, True]
        node.failures[:] = [OVERFLOWED, OVERFLOWED]
        assert status_of(router)[0] >= 500, "whoever overflows 16 bits fails as by any other error"
        router.wait_idle()


# README says: "then gets 429 with Retry-After"
def test_it_does_not_wait_for_ever(folder: Path, nodes: Nodes) -> None:
    node, timeouts = nodes.start(), replace(FAST, connect_s=1.0)
    with RouterInThread(folder, addresses(node), timeouts=timeouts) as router:
        router.wait_ready()
        node.failures[:] = [FULL] * ALWAYS
        start = time.monotonic()
        status, error, headers = status_of(router)
        assert (status, error["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
        assert time.monotonic() - start >= timeouts.connect_s
        assert ALWAYS - len(node.failures) < 20, "not asked all the time"
        router.wait_idle()


def test_only_so_many_wait(folder: Path, nodes: Nodes) -> None:
    node = nodes.start()
    with RouterInThread(folder, addresses(node), max_queue=3) as router:
        router.wait_ready()
        node.failures[:] = [FULL] * ALWAYS
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(status_of, router) for _ in range(3)]
            wait_until(lambda: router.worker.service.num_active == 3, "all three")
            wait_until(lambda: router.worker.service.num_waiting == 3, "all three to be turned away")
            num_left = len(node.failures)
            while len(node.failures) > num_left - 30:
                assert status_of(router)[0] == 429, "also while they ask again"
            assert router.worker.service.num_active == 3, "it did not wait for the others"
            node.failures.clear()
            assert [result.result(PATIENCE_S)[0] for result in waiting] == [200] * 3


def test_a_node_that_begins_to_drain_is_asked_once(folder: Path, nodes: Nodes) -> None:
    """Its Status says so only with the next heartbeat."""
    nodes_here = [nodes.start(), nodes.start()]
    with RouterInThread(folder, addresses(*nodes_here), max_attempts=1, placement="round_robin") as router:
        router.wait_ready()
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "both nodes")
        for node in nodes_here:
            node.failures[:] = [DRAINING]
            assert [status_of(router)[0] for _ in range(3)] == [200] * 3
            assert not node.failures


def test_a_node_that_joined_with_less_room_does_not_end_a_request_early(folder: Path, nodes: Nodes) -> None:
    """It would count as ended by length, with fewer tokens than the first node had promised."""
    large = nodes.start(hold_after_tokens=6)
    with RouterInThread(folder, addresses(large), timeouts=replace(FAST, connect_s=1.0)) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=100)
            wait_until(lambda: large.num_tokens > 5, "some tokens")
            small = nodes.start(max_model_len=len(PROMPT) + 99)
            router.call(lambda: router.worker.service.cluster.add(small.address))
            wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "the smaller node")
            large.die()
            ids, error = result.result(PATIENCE_S)
        assert ids == output(6)
        assert error is not None
        assert "may have 140 tokens, and the nodes that are connected take 139" in error["message"]
        assert not small.submits
        assert status_of(router)[0] == 200, "what fits is served there"
        router.wait_idle()
