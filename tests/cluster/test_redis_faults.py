"""A cluster serves on, with the right tokens, whatever happens to its Redis, and Redis is whole again soon after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from waiting import PATIENCE_S, wait_until

from real_cluster import RealCluster
from redis_process import RedisProcess, running_redis
from tandem.kv_connector.directory.records import KeySpace
from tandem.router.metrics.nodes import read_nodes
from tiny_models import random_prompt, tiny_model

NUM_TOKENS = 6
_fresh = count(10**6)
PROMPTS = [random_prompt(40 + 16 * number, seed=number) for number in range(6)]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisProcess]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(redis_server: RedisProcess) -> Iterator[RealCluster]:
    with RealCluster(
        tiny_model("llama"), "--prefill", "1", "--decode", "1", "--redis-url", redis_server.url
    ) as cluster:
        yield cluster


@contextmanager
def load(cluster: RealCluster) -> Iterator[Callable[[], int]]:
    """Two clients that ask all the time and compare; yields how many answers came. What went wrong is raised."""
    expected = [cluster.tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
    stop, faults, answers = threading.Event(), [], []

    def ask(client: int) -> None:
        number = client
        while not stop.is_set():
            number += 1
            index = number % len(PROMPTS)
            try:
                fresh = random_prompt(50, seed=10_000 * (client + 1) + number)  # evicts, so that nodes publish
                cluster.tokens(fresh, 2)
                assert cluster.tokens(PROMPTS[index], NUM_TOKENS) == expected[index]
            except Exception as fault:
                faults.append(fault)
                return
            answers.append(index)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: len(answers)
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
    assert not faults, faults[0]


def blocks_that_nodes_publish(cluster: RealCluster) -> int:
    assert len(read_nodes(cluster.metrics())) == 2
    return int(cluster.counter("directory_blocks"))


def blocks_in_redis(server: RedisProcess) -> int:
    client = server.client()
    return sum(client.scard(key) for key in client.keys(f"{KeySpace('tandem').namespace}:*:kv:*"))


def check_whole_soon(cluster: RealCluster, server: RedisProcess) -> None:
    """Under load the two are never read at the same moment: equal but for what changes meanwhile."""

    def is_whole() -> bool:
        there, published = blocks_in_redis(server), blocks_that_nodes_publish(cluster)
        return abs(there - published) <= 16 < published

    wait_until(is_whole, "Redis to have what the nodes publish")


def check_router_hears(cluster: RealCluster) -> None:
    """What a node computes now is in the router's copy of the directory soon."""
    prompt = random_prompt(50, seed=next(_fresh))
    cluster.tokens(prompt, 2)

    def is_known() -> bool:
        answer = cluster.client.post("/explain", json={"model": cluster.model, "prompt": prompt}).json()
        return max(node["num_cached_tokens"] for node in answer["prompts"][0]["nodes"]) == 48

    wait_until(is_known, "the router to hear of a block")


def check_serves_on(answers: Callable[[], int], seconds: float) -> None:
    """For so long at least."""
    time.sleep(seconds)
    before = answers()
    wait_until(lambda: answers() > before + 2, "requests, which stand still")


def test_redis_is_emptied_killed_and_started_again(cluster: RealCluster, redis_server: RedisProcess) -> None:
    with load(cluster) as answers:
        check_whole_soon(cluster, redis_server)
        redis_server.client().flushall()
        check_whole_soon(cluster, redis_server)
        check_router_hears(cluster)
        redis_server.stop()
        check_serves_on(answers, 3.0)
        redis_server.start()
        check_whole_soon(cluster, redis_server)
        check_router_hears(cluster)


@pytest.mark.parametrize("pause_s", [2.0, pytest.param(30.0, marks=pytest.mark.slow)])  # within the leases, and beyond
def test_redis_answers_nobody_for_a_while(cluster: RealCluster, redis_server: RedisProcess, pause_s: float) -> None:
    with load(cluster) as answers:
        check_whole_soon(cluster, redis_server)
        redis_server.pause()
        try:
            check_serves_on(answers, pause_s)
        finally:
            redis_server.resume()
        check_whole_soon(cluster, redis_server)
        check_router_hears(cluster)
        check_serves_on(answers, 2.0)
