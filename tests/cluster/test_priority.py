"""A request of higher priority takes the slot of a running one, over HTTP, on one node and on the decode node of two,
which keep deadlines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from router_in_thread import RouterInThread
from split_pair import GREEDY, Alone, changed
from waiting import wait_until

from in_process_cluster import Node, node_options
from tiny_models import random_prompt, tiny_model


def body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **fields}


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["single", "split"])
def test_who_matters_more_ends_first(roles: tuple[str, ...], alone: Alone) -> None:
    low_prompt, high_prompt = random_prompt(40, seed=51), random_prompt(70, seed=52)
    own: dict[str, Any] = {"max_num_seqs": 1, "tpot_target_ms": 5}
    nodes = [Node(node_options(role, tiny_model("llama"), **({} if role == "prefill" else own))) for role in roles]
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(tiny_model("llama"), addresses, local_tail_tokens=0) as router, ThreadPoolExecutor() as threads:
        router.wait_ready()
        first = nodes[0]
        first.hold_after(6)
        low = body(low_prompt, 120, priority=5, stream=True)
        with router.client.stream("POST", "/v1/completions", json=low) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            made = [next(lines)]  # it runs
            hasty = {"ttft_target_ms": 200, "tpot_target_ms": 10, "itl_max_ms": 20}
            high = body(high_prompt, 4, priority=0, **hasty)
            asked = threads.submit(router.client.post, "/v1/completions", json=high)
            state = first.process.logic.scheduler.state
            wait_until(lambda: len(state.queues.waiting) == 1, "the second request to wait for the first one's slot")
            first.go_on()
            [choice] = asked.result().json()["choices"]
            made += lines
        tokens = [token for line in made[:-1] for each in json.loads(line)["choices"] for token in each["token_ids"]]
        assert made[-1] == "[DONE]"
        assert state.num_preemptions == 1
        assert [tokens] == alone.run(low_prompt, changed(GREEDY, max_tokens=120))
        assert [choice["token_ids"]] == alone.run(high_prompt, changed(GREEDY, max_tokens=4))
        for node in nodes:
            node.wait_until_whole()
    for node in nodes:
        node.stop()
