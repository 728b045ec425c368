"""Tenants through a whole cluster: router, Redis, prefill and decode node. Nobody finds what another has computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from real_cluster import RealCluster
from tiny_models import random_prompt, tiny_model

BLOCK = 16
PUBLIC = random_prompt(3 * BLOCK + 5, seed=77)  # three whole blocks of it can be shared
KEYS = {
    "keys": {"a1": "acme", "a2": "acme", "g": "globex", "s": "small"},
    "tenants": {"small": {"cache_share": 8 / 256}},
    "public_prefixes": [PUBLIC],
}
LONG = 6 * BLOCK + 3
_seeds = count(1000)


@pytest.fixture(scope="module", params=["split", pytest.param("single", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps(KEYS))
    split = ("--prefill", "1", "--decode", "1", "--host-tier-bytes", "0")  # without a tier a share is easily counted
    nodes = split if request.param == "split" else ()
    with RealCluster(tiny_model("llama"), *nodes, "--api-keys-file", str(keys)) as cluster:
        cluster.has_directory = request.param == "split"  # type: ignore[attr-defined]
        yield cluster


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(LONG, seed=next(_seeds))


def ask(cluster: RealCluster, key: str, prompt: list[int], **fields: Any) -> tuple[int, list[int]]:
    """(prompt tokens found in a cache, output)."""
    body = {"model": cluster.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = cluster.client.post(
        "/v1/completions", json={**body, "max_tokens": 4, **fields}, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["choices"][0]["token_ids"]


def cached_by_placement(cluster: RealCluster, key: str, prompt: list[int]) -> list[int]:
    """What the router, by its mirror of the directory, counts as cached on each node for that key."""
    answer = cluster.client.post(
        "/explain", json={"model": cluster.model, "prompt": prompt}, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text
    return [node["num_cached_tokens"] for node in answer.json()["prompts"][0]["nodes"]]


# README says: "maps keys to tenants, whose caches don't see each other"
def test_a_tenant_finds_its_own_and_nobody_elses(cluster: RealCluster, prompt: list[int]) -> None:
    whole = LONG // BLOCK * BLOCK
    cached, output = ask(cluster, "a1", prompt)
    assert cached == 0
    assert ask(cluster, "g", prompt) == (0, output), "the same prompt of another tenant is computed anew"
    assert ask(cluster, "a2", prompt) == (whole, output), "another key of the same tenant shares"
    assert ask(cluster, "g", prompt) == (whole, output)
    assert ask(cluster, "a1", [*prompt, *output])[0] >= whole


def test_the_router_looks_up_what_the_tenant_may_find(cluster: RealCluster, prompt: list[int]) -> None:
    ask(cluster, "a1", prompt)
    if cluster.has_directory:
        wait_until(
            lambda: max(cached_by_placement(cluster, "a1", prompt)) == LONG // BLOCK * BLOCK,
            "the router to hear of it",
        )
    assert not any(cached_by_placement(cluster, "g", prompt))


def test_a_cache_salt_narrows_a_tenants_cache(cluster: RealCluster, prompt: list[int]) -> None:
    cached, output = ask(cluster, "a1", prompt, cache_salt="alice")
    assert cached == 0
    assert ask(cluster, "a1", prompt) == (0, output)
    assert ask(cluster, "a1", prompt, cache_salt="bob") == (0, output)
    assert ask(cluster, "g", prompt, cache_salt="alice") == (0, output)
    assert ask(cluster, "a2", prompt, cache_salt="alice") == (LONG // BLOCK * BLOCK, output)


def test_a_public_prefix_is_shared_and_nothing_after_it(cluster: RealCluster, prompt: list[int]) -> None:
    public = len(PUBLIC) // BLOCK * BLOCK
    mine = [*PUBLIC, *prompt]
    ask(cluster, "a1", mine)
    cached, output = ask(cluster, "g", mine)
    assert cached == public, "the system prompt, but not what acme asked"
    other = [*PUBLIC, *random_prompt(40, seed=next(_seeds))]
    assert ask(cluster, "g", other)[0] == public
    assert ask(cluster, "a2", mine) == (len(mine) // BLOCK * BLOCK, output)
    half = [*PUBLIC[: 2 * BLOCK + 3], *prompt]
    assert ask(cluster, "g", half)[0] == 2 * BLOCK, "part of a public prefix is as public"


def test_a_tenant_over_its_share_forgets_its_own(cluster: RealCluster, prompt: list[int]) -> None:
    if not cluster.has_directory:
        pytest.skip("the host tier of this cluster has room for more")
    ask(cluster, "a1", prompt)
    first, second, third = (random_prompt(4 * BLOCK + 1, seed=next(_seeds)) for _ in range(3))
    for own in (first, second, third):
        ask(cluster, "s", own)
    assert ask(cluster, "s", third)[0] == 4 * BLOCK
    assert ask(cluster, "s", first)[0] == 0, "eight blocks are its share"
    assert ask(cluster, "a1", prompt)[0] == LONG // BLOCK * BLOCK


def test_who_has_no_key_is_refused_everywhere(cluster: RealCluster, prompt: list[int]) -> None:
    body = {"model": cluster.model, "prompt": prompt}
    for path in ("/v1/completions", "/explain", "/tokenize"):
        assert cluster.client.post(path, json=body, headers={"Authorization": "Bearer acme"}).status_code == 401
