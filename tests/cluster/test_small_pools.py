"""A pool too small for the model's length is known at the start: what is promised, every node can hold."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from router_in_thread import RouterInThread
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.node.setup import load, with_length_that_fits
from tiny_models import random_prompt, reference_greedy, tiny_model

MODEL = tiny_model("llama")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_a_single_node_serves_what_its_pool_holds_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(node_options("unified", MODEL, num_blocks=4))
    with RouterInThread(MODEL, (node.info.control_address,)) as router:
        router.wait_ready()
        assert router.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        body = {"prompt": random_prompt(30, seed=1), **GREEDY}
        answer = router.client.post("/v1/completions", json={**body, "max_tokens": 34}).json()
        assert answer["choices"][0]["token_ids"] == reference_greedy(MODEL, body["prompt"], 34).token_ids
        refused = router.client.post("/v1/completions", json={**body, "max_tokens": 35})
        assert refused.status_code == 400
        assert "together they may not exceed 64" in refused.text
    node.stop()
    assert (
        len(re.findall(r"WARNING.*the model takes 2048 tokens, but .* holds 64: max_model_len is 64", caplog.text)) == 1
    )


def test_a_length_that_was_asked_for_and_does_not_fit_ends_the_start() -> None:
    command = [sys.executable, "-m", "tandem.deploy.cli", "serve", str(MODEL), "--port", "0", "--block-size", "16"]
    asked = ("--hash-block-size", "16", "--num-blocks", "4", "--max-model-len", "65")
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 2
    assert re.search(
        r"--max-model-len is 65, but the KV pool of 4 blocks .* holds 64: lower it to 64 or less", done.stderr
    )


def test_the_length_follows_the_pool() -> None:
    def length(num_blocks: int, asked: int = 0) -> int:
        model = ModelOptions(str(MODEL), load_format="dummy", max_model_len=asked)
        options = NodeOptions("unified", model, CacheOptions(block_size=16, hash_block_size=16), device="cpu")
        return with_length_that_fits(load(options), options, num_blocks).max_model_len

    assert [length(num_blocks) for num_blocks in (2, 127, 128, 129)] == [32, 2032, 2048, 2048]
    assert length(4, asked=64) == 64
    with pytest.raises(ConfigError, match="lower it to 48 or less"):
        length(3, asked=49)
    with pytest.raises(ConfigError, match="--max-model-len 1 has no room for an output"):
        length(4, asked=1)


@pytest.mark.parametrize(("prefill", "decode"), [(8, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_a_cluster_promises_what_its_smallest_node_holds(prefill: int, decode: int) -> None:
    sizes = {"prefill": prefill, "decode": decode}
    nodes = [Node(node_options(role, MODEL, num_blocks=size)) for role, size in sizes.items()]
    assert [node.info.max_model_len for node in nodes] == [16 * prefill, 16 * decode]
    assert nodes[0].info.identity == nodes[1].info.identity
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(MODEL, addresses, local_tail_tokens=0) as router:
        router.wait_ready()
        assert router.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        for length in (62, 49, 48, 33, 5):
            prompt = random_prompt(length, seed=length)
            body = {"prompt": prompt, "max_tokens": 64 - length, "n": 2, **GREEDY}
            answer = router.client.post("/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            expected = reference_greedy(MODEL, prompt, 64 - length).token_ids
            assert [choice["token_ids"] for choice in answer.json()["choices"]] == [expected] * 2
        refused = router.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 60, **GREEDY})
        assert refused.status_code == 400
    for node in nodes:
        node.stop()
