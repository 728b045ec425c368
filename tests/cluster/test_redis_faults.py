"""A cluster serves on, with the right tokens, whatever happens to its Redis, and Redis is whole again soon after."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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


class Load:
    """Two clients that ask again and again and compare; `answers` counts. What went wrong is raised at the end."""

    def __init__(self, cluster: RealCluster) -> None:
        self.answers = 0
        self._cluster = cluster
        self._expected = [cluster.tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
        self._stop, self._may_ask = threading.Event(), threading.Event()
        self._faults: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(2)]

    def __enter__(self) -> Load:
        self._may_ask.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._may_ask.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not self._faults, self._faults[0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing new is asked meanwhile."""
        self._may_ask.clear()
        try:
            yield
        finally:
            self._may_ask.set()

    def _ask(self, client: int) -> None:
        number = client
        while not self._stop.is_set():
            self._may_ask.wait()
            number += 1
            index = number % len(PROMPTS)
            try:
                fresh = random_prompt(50, seed=10_000 * (client + 1) + number)  # evicts, so that nodes publish
                self._cluster.tokens(fresh, 2)
                assert self._cluster.tokens(PROMPTS[index], NUM_TOKENS) == self._expected[index]
            except Exception as fault:
                self._faults.append(fault)
                return
            self.answers += 1
            time.sleep(0.1)  # a cluster that is kept busy shows no more


def blocks_that_nodes_publish(cluster: RealCluster) -> int:
    """-1: the router doesn't hear of both nodes, as on a machine that is too busy for their heartbeats."""
    return int(cluster.counter("directory_blocks")) if len(read_nodes(cluster.metrics())) == 2 else -1


def blocks_in_redis(server: RedisProcess) -> int:
    client = server.client()
    return sum(client.scard(key) for key in client.keys(f"{KeySpace('tandem').namespace}:*:kv:*"))


def check_whole_soon(cluster: RealCluster, server: RedisProcess, load: Load) -> None:
    """Once nothing changes any more: under load the two are never read at the same moment."""
    with load.paused():
        wait_until(
            lambda: blocks_in_redis(server) == blocks_that_nodes_publish(cluster) > 16,
            "Redis to have what the nodes publish",
        )


def check_router_hears(cluster: RealCluster) -> None:
    """What a node computes now is in the router's copy of the directory soon."""
    prompt = random_prompt(50, seed=next(_fresh))
    cluster.tokens(prompt, 2)

    def is_known() -> bool:
        answer = cluster.client.post("/explain", json={"model": cluster.model, "prompt": prompt}).json()
        return max(node["num_cached_tokens"] for node in answer["prompts"][0]["nodes"]) == 48

    wait_until(is_known, "the router to hear of a block")


def check_serves_on(load: Load, seconds: float) -> None:
    """For so long at least."""
    time.sleep(seconds)
    before = load.answers
    wait_until(lambda: load.answers > before + 2, "requests, which stand still")


def test_redis_is_emptied_killed_and_started_again(cluster: RealCluster, redis_server: RedisProcess) -> None:
    with Load(cluster) as load:
        check_whole_soon(cluster, redis_server, load)
        redis_server.client().flushall()
        check_whole_soon(cluster, redis_server, load)
        check_router_hears(cluster)
        redis_server.stop()
        check_serves_on(load, 2.0)
        redis_server.start()
        check_whole_soon(cluster, redis_server, load)
        check_router_hears(cluster)


@pytest.mark.parametrize("pause_s", [2.0, pytest.param(30.0, marks=pytest.mark.slow)])  # within the leases, and beyond
def test_redis_answers_nobody_for_a_while(cluster: RealCluster, redis_server: RedisProcess, pause_s: float) -> None:
    with Load(cluster) as load:
        check_whole_soon(cluster, redis_server, load)
        redis_server.pause()
        try:
            check_serves_on(load, pause_s)
        finally:
            redis_server.resume()
        check_whole_soon(cluster, redis_server, load)
        check_router_hears(cluster)
        check_serves_on(load, 1.0)
