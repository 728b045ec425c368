"""Real processes, two of each role: streams go on while their decode node drains and a prefill node with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from stream_client import Stream
from waiting import PATIENCE_S, wait_until, wait_until_gone

from real_cluster import RealCluster
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTH = 350
SEEDED = {"temperature": 0.8, "seed": 77, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    with RealCluster(tiny_model("llama"), "--prefill", "2", "--decode", "2", "--transport", "tcp") as running:
        running.wait_until_ready(4)
        yield running
        running.process.terminate()
        assert running.process.wait(2 * PATIENCE_S) == 0, running.log()


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
        streams = [stream(cluster, random_prompt(80 + 10 * i, seed=63 + i)) for i in range(3)]
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
        for i, result in enumerate(results[:3]):
            check_greedy(tiny_model("llama"), random_prompt(80 + 10 * i, seed=63 + i), result[0], LENGTH)
        assert results[3:] == [alone, four]
        assert late.finish() == alone, "one that came while they drained"
        cluster.wait_until_ready(4)
        cluster.wait_until_whole()
        return cluster.router_metric("migration_pause_seconds_count") - before

    assert any(num_moved_by_a_drain() > 0 for _ in range(3)), "each time they ended before they could move"
