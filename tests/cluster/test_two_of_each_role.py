"""A whole cluster as a person runs it, two nodes of each role: a prefix that one prefill node has is pulled by the
other, and streams go on while their decode node drains and a prefill node with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from stream_client import Stream
from waiting import PATIENCE_S, wait_until, wait_until_gone

from real_cluster import RealCluster
from tandem.deploy.bench.node_figures import capacity_tokens, hits_by_tier, read_when_still
from tiny_models import check_greedy, random_prompt, tiny_model

BLOCK = 16
PREFIX = random_prompt(60 * BLOCK, seed=41)
LENGTH = 250
SEEDED = {"temperature": 0.8, "seed": 77, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    nodes = ("--prefill", "2", "--decode", "2", "--transport", "tcp", "--placement", "round_robin", "--pull-s", "20")
    with RealCluster(tiny_model("llama"), *nodes) as running:
        running.wait_until_ready(4)
        yield running
        running.process.terminate()
        assert running.process.wait(2 * PATIENCE_S) == 0, running.log()


def explained(cluster: RealCluster, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """By node_id."""
    answer = cluster.client.post("/explain", json={"model": cluster.model, "prompt": prompt})
    assert answer.status_code == 200, answer.text
    return {node["node_id"]: node for node in answer.json()["prompts"][0]["nodes"]}


def test_the_second_prefill_node_pulls_what_the_first_computed(cluster: RealCluster) -> None:
    first, second = ([*PREFIX, *random_prompt(3 * BLOCK + 5, seed=seed)] for seed in (1, 2))
    check_greedy(tiny_model("llama"), first, cluster.tokens(first, 6)[0], 6)

    def holders() -> list[str]:
        found = explained(cluster, second).values()
        return [node["node_id"] for node in found if node["num_cached_tokens"] >= len(PREFIX)]

    wait_until(lambda: len(holders()) == 2, "the directory to tell of both halves")
    idle = next(
        node
        for node in explained(cluster, second).values()
        if node["node_id"] not in holders() and node["role"] == "prefill"
    )
    assert idle["fetched_from"] in holders()
    assert idle["num_fetched_tokens"] == len(PREFIX)

    answer = cluster.complete(second, max_tokens=6)
    assert answer.status_code == 200, answer.text
    check_greedy(tiny_model("llama"), second, answer.json()["choices"][0]["token_ids"], 6)
    assert f"prompt={idle['node_id']}" in answer.headers["x-tandem-placement"]
    assert f"fetched={len(PREFIX)} from=" in answer.headers["x-tandem-placement"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(PREFIX)
    for name, value in (("completed", 1), ("tokens", len(PREFIX)), ("served_blocks", len(PREFIX) // BLOCK)):
        wait_until(lambda name=name, value=value: cluster.counter(f"pull_{name}") == value, f"reports of {name}")
    figures = asyncio.run(read_when_still(cluster.url))
    assert hits_by_tier({}, figures) == {"gpu": 0, "cpu": 0, "disk": 0, "peer": len(PREFIX)}
    assert all(node.figures["busy_s"] > 0 for node in figures.values())
    assert all(capacity_tokens(node) > 256 * BLOCK for node in figures.values()), "pool and host tier"
    cluster.wait_until_whole()


def stream(cluster: RealCluster, prompt: list[int], **fields: object) -> Stream:
    return Stream(cluster.url, cluster.model, prompt, LENGTH, **fields)


def decoders_by_load(cluster: RealCluster, streams: list[Stream]) -> list[int]:
    """Processes of the decode nodes, the one with the most running sequences first."""
    wait_until(
        lambda: any(cluster.by_node("num_running", "decode").values()) or all(each.has_ended for each in streams),
        "the nodes to report what runs",
    )
    running = cluster.by_node("num_running", "decode")
    return [cluster.pid_of_node(node) for node in sorted(running, key=lambda node: -running[node])]


# README says: "sequences of a decode or single node go on at another one, KV and all"
def test_draining_nodes_give_their_streams_away(cluster: RealCluster) -> None:
    prompt = random_prompt(100, seed=61)
    alone = stream(cluster, prompt, **SEEDED).finish()
    four = stream(cluster, random_prompt(90, seed=62), n=4, **SEEDED).finish()
    cluster.wait_until_whole()

    def num_moved_by_a_drain() -> float:
        before = cluster.router_metric("migration_pause_seconds_count")
        streams = [stream(cluster, random_prompt(80 + 10 * i, seed=63 + i)) for i in range(2)]
        streams += [stream(cluster, prompt, **SEEDED), stream(cluster, random_prompt(90, seed=62), n=4, **SEEDED)]
        for each in streams:
            each.wait_for(20)
        victim, _ = decoders_by_load(cluster, streams)
        prefill = cluster.pid_of("prefill")
        for pid in (victim, prefill):
            cluster.send(pid, signal.SIGTERM)
        late = stream(cluster, prompt, **SEEDED)
        for pid in (victim, prefill):
            wait_until_gone(pid)
        results = [each.finish() for each in streams]
        for i, result in enumerate(results[:2]):
            check_greedy(tiny_model("llama"), random_prompt(80 + 10 * i, seed=63 + i), result[0], LENGTH)
        assert results[2:] == [alone, four]
        assert late.finish() == alone, "one that came while they drained"
        cluster.wait_until_ready(4)
        cluster.wait_until_whole()
        return cluster.router_metric("migration_pause_seconds_count") - before

    assert any(num_moved_by_a_drain() > 0 for _ in range(3)), "each time they ended before they could move"
