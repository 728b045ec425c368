"""Nodes that die, fall silent, refuse or stammer. Over real HTTP and ZMQ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from router_in_thread import FAST, RouterInThread
from router_nodes import (
    LONG,
    PROMPT,
    Nodes,
    Wire,
    addresses,
    output,
    stream_events,
)
from waiting import PATIENCE_S, wait_until


def test_another_node_continues_the_stream_of_one_that_died(folder: Path, nodes: Nodes) -> None:
    # Of equal nodes the one whose name comes first is taken.
    first = nodes.start(step_s=0.005, die_after_tokens=7, node_id="a")
    second = nodes.start(node_id="b")
    with RouterInThread(folder, addresses(first, second)) as router:
        router.wait_ready()
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "both nodes")
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
    decode = [nodes.start("decode", hold_after_tokens=6, node_id=f"d{i}") for i in range(2)]
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
            for node in (*decode, *prefill):
                node.go_on()
            ids, error = result.result(PATIENCE_S)
        assert (ids, error) == (output(40, LONG), None)
        router.wait_idle()


def test_samples_of_a_lost_node_continue_one_by_one(folder: Path, nodes: Nodes) -> None:
    first = nodes.start(step_s=0.005, die_after_tokens=13, hold_tokens=True)
    second = nodes.start(draining=True)
    with RouterInThread(folder, addresses(first, second)) as router:
        router.wait_ready()
        cluster = router.worker.service.cluster
        wait_until(lambda: len(cluster.serving()) == 2, "the node that takes nothing yet")
        body = {"prompt": PROMPT, "n": 3, "max_tokens": 12, "return_token_ids": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(router.client.post, "/v1/completions", json=body)
            wait_until(lambda: first.submits, "the request on the node that will be lost")
            second.draining = False
            wait_until(lambda: not any(view.draining for view in cluster.serving()), "the other to take requests")
            first.hold_tokens = False
            answer = asked.result(PATIENCE_S).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [output(12, sample=i) for i in range(3)]
        assert sorted(s.request_id.rsplit("-", 1)[1] for s in second.submits) == ["s0", "s1", "s2"]
        assert answer["usage"]["completion_tokens"] == 36


def test_silence_counts_as_loss_and_the_node_may_come_back(folder: Path, nodes: Nodes) -> None:
    first, second = nodes.start(step_s=0.01), nodes.start(draining=True)
    with RouterInThread(
        folder, addresses(first, second), timeouts=replace(FAST, heartbeat_s=0.05, peer_lost_s=0.5)
    ) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=30)
            wait_until(lambda: first.num_tokens > 5, "some tokens")
            first.silent = True
            second.draining = False
            ids, error = result.result(PATIENCE_S)
        assert (ids, error) == (output(30), None)
        first.silent = False  # goes on with its old attempt: late tokens are dropped
        wait_until(lambda: len(router.client.get("/ready").json()["nodes"]) == 2, "the first node's return")
        router.wait_idle()


def test_a_node_that_may_be_lost_soon_gets_nothing_that_another_can_take(folder: Path, nodes: Nodes) -> None:
    here = [nodes.start(), nodes.start()]
    with RouterInThread(folder, addresses(*here), placement="round_robin") as router:
        router.wait_ready()
        cluster = router.worker.service.cluster
        wait_until(lambda: len(cluster.serving()) == 2, "both nodes")
        here[0].silent = True
        wait_until(lambda: any(view.silent for view in cluster.serving()), "unanswered heartbeats")
        for _ in range(3):
            assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert not here[0].submits
        here[0].silent = False
        wait_until(lambda: not any(view.silent for view in cluster.serving()), "an answer")
        for _ in range(2):
            assert stream_events(router.client, max_tokens=5) == (output(5), None)
        assert here[0].submits


def test_a_broken_connection_to_a_living_node(folder: Path, nodes: Nodes) -> None:
    """Tokens on the way are lost with it, so the attempt is given up, cancelled when the node is back, and repeated."""
    node = nodes.start(step_s=0.01, hold_after_tokens=6)
    wire = Wire(node.port)
    with RouterInThread(folder, (wire.address,)) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=30)
            wait_until(lambda: node.num_tokens > 5, "some tokens")
            wire.cut()
            node.go_on()
            assert result.result(PATIENCE_S) == (output(30), None)
        assert {s.attempt for s in node.submits} == {1, 2}
        router.wait_idle()
        assert [c.attempt for c in node.cancels] == [1]
    wire.close()


def test_a_connection_on_which_nobody_answers_is_made_again(folder: Path, nodes: Nodes) -> None:
    wire = Wire(nodes.start().port, num_mute=2)
    with RouterInThread(folder, (wire.address,), timeouts=replace(FAST, heartbeat_s=0.05, peer_lost_s=0.5)) as router:
        router.wait_ready()
        assert stream_events(router.client, max_tokens=5) == (output(5), None)
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
    with RouterInThread(folder, addresses(deaf, other), timeouts=replace(FAST, connect_s=1.0)) as router:
        router.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(stream_events, router.client, max_tokens=5)
            wait_until(lambda: deaf.submits, "the request on the deaf node")
            other.draining = False
            assert result.result(PATIENCE_S) == (output(5), None)
        router.wait_idle()
        assert deaf.cancels
