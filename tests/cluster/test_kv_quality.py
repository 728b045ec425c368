"""With --kv-quality-sample-rate nodes measure, while they serve, what their cache's format costs, and /metrics shows
it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from router_in_thread import RouterInThread
from waiting import wait_until

from in_process_cluster import Node, node_options
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.precision.kv_quality import make_kv_quality
from tandem.router.metrics.nodes import read_nodes
from tiny_models import random_prompt, reference_greedy, tiny_model

NUM_TOKENS = 12


def measured(options: list[NodeOptions]) -> dict[str, float]:
    """What the node that decodes has counted when a request of NUM_TOKENS tokens is over, and the request's tokens."""
    folder, prompt = tiny_model("llama"), random_prompt(40, seed=9)
    nodes = [Node(each) for each in options]
    addresses = tuple(node.info.control_address for node in nodes)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found: dict[str, float] = {}

    def is_counted() -> bool:
        readings = read_nodes(router.client.get("/metrics").text)
        found.update(readings[nodes[0].info.node_id].figures)
        return found["kv_quality_samples"] >= NUM_TOKENS - 1  # the first token's row reads nothing that was stored

    with RouterInThread(folder, addresses, local_tail_tokens=0) as router:
        wait_until(lambda: len(router.client.get("/ready").json().get("nodes", ())) == len(nodes), "all nodes")
        answer = router.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if "fp8_e4m3" not in {each.cache.kv_cache_dtype for each in options}:
            expected = reference_greedy(folder, prompt, NUM_TOKENS).token_ids
            assert answer.json()["choices"][0]["token_ids"] == expected
        wait_until(is_counted, "every step to be measured")
        router.wait_idle()
    for node in nodes:
        node.stop()
    return found


def mean_error(figures: dict[str, float]) -> float:
    return figures["kv_quality_error"] / figures["kv_quality_samples"]


def test_metrics_show_the_error_of_fp8() -> None:
    folder, rate = tiny_model("llama"), {"num_blocks": 64, "kv_quality_sample_rate": 1.0}
    decode_as_fp8 = node_options("decode", folder, kv_cache_dtype="fp8_e4m3", **rate)
    exact = mean_error(measured([node_options("unified", folder, **rate)]))
    fp8 = mean_error(measured([node_options("unified", folder, kv_cache_dtype="fp8_e4m3", **rate)]))
    split = mean_error(measured([decode_as_fp8, node_options("prefill", folder, num_blocks=64)]))
    assert exact < 1e-4, "what is left when the same is computed in another order"
    assert 10 * exact < fp8 < 0.5
    assert 10 * exact < split < 0.5, "what the decode node was handed was quantised on its way"


@pytest.mark.parametrize("lack", ["a model with an encoder", "--tensor-parallel-size"])
def test_what_cannot_be_measured_is_refused(lack: str) -> None:
    options = node_options("unified", tiny_model("llama"), kv_quality_sample_rate=0.5)
    of_ranks = lack.startswith("--")
    model: Any = SimpleNamespace(group=object() if of_ranks else None, encoder=None if of_ranks else object())
    with pytest.raises(ConfigError, match=f"--kv-quality-sample-rate can't be served with {lack}"):
        make_kv_quality(model, options, None)
