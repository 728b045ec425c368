"""Wall clocks that jump by hours while a cluster serves: no decision depends on them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until
from wall_clock import WallClock, find_compiler

from real_cluster import RealCluster
from tandem.deploy.options import DEMO_MODEL

JUMPS_S = (7200, -7200, 90_000, -90_000, 0)
PROMPTS = [[2 + (i + 11 * j) % 2000 for j in range(length)] for i, length in enumerate((5, 90, 300, 700))]
NUM_TOKENS = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the library that moves clocks"),
]


@pytest.mark.parametrize("split", [("--prefill", "1", "--decode", "2", "--rebalance-kv", "0.2"), ()])
def test_wall_clocks_that_jump_lose_and_change_nothing(split: tuple[str, ...], tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    with RealCluster(DEMO_MODEL, *split, "--request-s", "100", environment=clock.environment) as cluster:
        num_nodes = 3 if split else 1
        cluster.wait_until_ready(num_nodes)
        expected = [cluster.tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]
        nodes = node_ids(cluster)
        for jump_s in JUMPS_S:
            answers: dict[int, list[list[int]]] = {}
            threads = [threading.Thread(target=ask, args=(cluster, number, answers)) for number in range(len(PROMPTS))]
            for thread in threads:
                thread.start()
            clock.jump_to(jump_s)
            for thread in threads:
                thread.join(110)
            assert [answers.get(number) for number in range(len(PROMPTS))] == expected
            wait_until_clock_is(cluster, jump_s)
            assert cluster.tokens(PROMPTS[1], NUM_TOKENS) == expected[1]
        cluster.wait_until_ready(num_nodes)
        assert node_ids(cluster) == nodes, "nobody was given up"
        cluster.wait_until_whole()


def ask(cluster: RealCluster, number: int, answers: dict[int, list[list[int]]]) -> None:
    answers[number] = cluster.tokens(PROMPTS[number], NUM_TOKENS)


def node_ids(cluster: RealCluster) -> set[str]:
    return {node["node_id"] for node in cluster.client.get("/ready").json()["nodes"]}


def wait_until_clock_is(cluster: RealCluster, offset_s: float) -> None:
    """The router's own clock, as its answers show it, is off by that much: the jump is real."""
    wait_until(
        lambda: abs(cluster.complete([5], max_tokens=1).json()["created"] - time.time() - offset_s) <= 60,
        "the router's wall clock to jump",
    )
