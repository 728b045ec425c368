"""Nodes of two ranks on CPU: the tokens of one rank, and nothing left when a rank dies under load."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest
from tensor_parallel_engine import run_in_child
from waiting import wait_until_gone

from real_cluster import RealCluster
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 64, 130)
NUM_TOKENS = 24
NUM_BLOCKS = 14  # each prompt fits, all of them with their output don't


def requests() -> list[dict[str, Any]]:
    """Greedy prompts in several chunks, two drawn samples of one prompt, and one with all that sampling can ask."""
    greedy = [{"name": f"g{n}", "prompt": random_prompt(n, n), "max_tokens": NUM_TOKENS} for n in LENGTHS]
    drawn = {"temperature": 1.0, "seed": 5, "top_k": 50, "top_p": 0.9, "samples": [0, 1], "max_tokens": 12}
    penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "num_logprobs": 2, "num_prompt_logprobs": 1}
    return [
        *greedy,
        {"name": "drawn", "prompt": random_prompt(20, 1), **drawn},
        {"name": "penalised", "prompt": random_prompt(30, 2), "max_tokens": 12, **penalised},
    ]


@pytest.mark.parametrize("kind", ["qwen3", "llama_one_kv_head"])
def test_two_ranks_make_the_tokens_of_one(kind: str) -> None:
    """KV heads shared out (qwen3) and repeated; prompts in chunks, preempted, and found in the cache."""
    spec = {"model": tiny_model(kind), "sizes": [1, 2], "num_blocks": NUM_BLOCKS, "requests": requests(), "rounds": 2}
    one, two = run_in_child(spec)
    assert one["num_preemptions"] > 0
    assert one["num_cached"] > 0
    assert len(one["ranks"]) == 2, "prompt log-probabilities were asked for in both rounds"
    assert two == one
    for length in LENGTHS:
        check_greedy(tiny_model(kind), random_prompt(length, length), two["tokens"][f"1-g{length}-0"], NUM_TOKENS)


def test_a_rank_without_memory_ends_its_step_and_not_the_node() -> None:
    """Wherever it runs out, on whichever rank: the others get on, the request fails, nothing of it is found later."""
    drawn = {"temperature": 1.0, "seed": 5, "num_logprobs": 1}
    faults: list[dict[str, Any]] = [
        {"rank": 1, "num_tokens": 33, "at": 0},
        {"rank": 1, "num_tokens": 35, "at": 1},
        {"rank": 0, "num_tokens": 37, "at": 1},
        {"rank": 1, "num_tokens": 39, "at": 1, "num_prompt_logprobs": 1, "num_logprobs": 1},
        {"rank": 1, "num_tokens": 41, "at": "gather", **drawn},
        {"rank": 0, "num_tokens": 43, "at": "sample", **drawn},
        {"rank": 1, "num_tokens": 48, "at": 1},  # the first chunk of a prompt: nothing is sampled
    ]
    asked = [{key: fault[key] for key in fault.keys() - {"rank", "num_tokens", "at"}} for fault in faults]
    lengths = [33, 35, 37, 39, 41, 43, 60]
    wanted = [
        {"name": str(n), "prompt": random_prompt(n, n), "max_tokens": 4, **more}
        for n, more in zip(lengths, asked, strict=True)
    ]
    spec = {"model": tiny_model("llama"), "num_blocks": 32, "requests": wanted, "rounds": 2}
    one, two = run_in_child({**spec, "sizes": [1, 2], "faults": faults})
    assert two["failed"] == {f"0-{length}": "out_of_memory" for length in lengths}
    assert two["steps_out_of_memory"] == len(faults)
    assert one["num_cached"] > two["num_cached"] == 0
    for length in lengths:
        assert two["tokens"][f"1-{length}-0"] == one["tokens"][f"1-{length}-0"]


def test_a_rank_that_dies_takes_its_node_along() -> None:
    model = tiny_model("llama")
    with RealCluster(model, "--tensor-parallel-size", "2") as cluster:
        prompt = random_prompt(40, 1)
        check_greedy(model, prompt, cluster.tokens(prompt, 16)[0], 16)
        node = psutil.Process(cluster.pid_of("unified"))
        (rank,) = node.children()
        rank.send_signal(signal.SIGKILL)
        wait_until_gone(node.pid)


def test_a_cluster_of_such_nodes_hands_over() -> None:
    model = tiny_model("llama")
    with RealCluster(model, "--tensor-parallel-size", "2", "--prefill", "1", "--decode", "1") as cluster:
        prompt = random_prompt(400, 1)
        check_greedy(model, prompt, cluster.tokens(prompt, 16)[0], 16)
