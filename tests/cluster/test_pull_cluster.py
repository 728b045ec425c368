"""A whole cluster as a person runs it: a prefix that one prefill node has is pulled by the other, and all say so."""

from __future__ import annotations

import asyncio
from typing import Any

from waiting import wait_until

from real_cluster import RealCluster
from tandem.deploy.bench.node_figures import capacity_tokens, hits_by_tier, read_when_still
from tiny_models import check_greedy, random_prompt, tiny_model

BLOCK = 16
PREFIX = random_prompt(60 * BLOCK, seed=41)


def explained(cluster: RealCluster, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """By node_id."""
    answer = cluster.client.post("/explain", json={"model": cluster.model, "prompt": prompt})
    assert answer.status_code == 200, answer.text
    return {node["node_id"]: node for node in answer.json()["prompts"][0]["nodes"]}


def test_the_second_prefill_node_pulls_what_the_first_computed() -> None:
    first, second = ([*PREFIX, *random_prompt(3 * BLOCK + 5, seed=seed)] for seed in (1, 2))
    nodes = ("--prefill", "2", "--decode", "1", "--placement", "round_robin", "--pull-s", "20")
    with RealCluster(tiny_model("llama"), *nodes) as cluster:
        cluster.wait_until_ready(3)
        check_greedy(tiny_model("llama"), first, cluster.tokens(first, 6)[0], 6)

        def holders() -> list[str]:
            found = explained(cluster, second).values()
            return [node["node_id"] for node in found if node["num_cached_tokens"] >= len(PREFIX)]

        wait_until(lambda: len(holders()) == 2, "the directory to tell of both halves")
        idle = next(node for node in explained(cluster, second).values() if node["node_id"] not in holders())
        assert idle["role"] == "prefill"
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
