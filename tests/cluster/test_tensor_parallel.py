"""Engines of two ranks on CPU: the tokens of one rank, and nothing left when a rank dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from eagle_heads import knowing_head, next_tokens, walking_model
from node_child import NodeChild
from quantised_checkpoints import mxfp4_folders
from served_head import GREEDY, PROMPT, walk
from tensor_parallel_engine import run_in_child
from tiny_hf_models import tiny_hf_model
from waiting import wait_until_gone

from in_process_cluster import Client
from real_cluster import RealCluster
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 64, 130)
NUM_TOKENS = 24
FEW = 10  # of models whose steps are slow
GRAMMAR = "start: /[a-z ]{10,20}/"
RARER = ("deepseek_v3", "gpt_neox", "phi3", "gemma2", "gemma3_text", "olmo2")  # each in processes of its own
NUM_BLOCKS = 14  # each prompt fits, all of them with their output don't


def requests() -> list[dict[str, Any]]:
    """Greedy prompts in several chunks, two drawn samples of one prompt, and one with all that sampling can ask."""
    greedy = [{"name": f"g{n}", "prompt": random_prompt(n, n), "max_tokens": NUM_TOKENS} for n in LENGTHS]
    drawn = {"temperature": 1.0, "seed": 5, "top_k": 50, "top_p": 0.9, "samples": [0, 1], "max_tokens": 12}
    penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "num_logprobs": 2, "num_prompt_logprobs": 1}
    return [
        *greedy,
        {"name": "drawn", "prompt": random_prompt(20, 1), **drawn},
        {"name": "guided", "prompt": random_prompt(25, 3), **drawn, "max_tokens": 40, "grammar": GRAMMAR},
        {"name": "penalised", "prompt": random_prompt(30, 2), "max_tokens": 12, **penalised},
    ]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("llama_one_kv_head", 2),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", -2, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_make_the_tokens_of_one(kind: str, ranks: int) -> None:
    """KV heads and experts' widths or whole experts shared out (qwen3_moe), KV heads repeated; prompts in chunks,
    preempted, cached."""
    spec = {
        "model": tiny_model(kind),
        "sizes": [1, ranks],
        "num_blocks": NUM_BLOCKS,
        "requests": requests(),
        "rounds": 2,
    }
    one, two = run_in_child(spec)
    assert one["num_preemptions"] > 0
    assert one["num_cached"] > 0
    assert len(one["ranks"]) == 2, "prompt log-probabilities were asked for in both rounds"
    assert two == one
    for length in LENGTHS:
        check_greedy(tiny_model(kind), random_prompt(length, length), two["tokens"][f"1-g{length}-0"], NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        # Quick tests have it where ranks give up a step.
        pytest.param("glm4_moe", (2,), marks=pytest.mark.slow),
        ("deepseek_v2", (-2,)),
        pytest.param("deepseek_v2", (2,), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (-2,), marks=pytest.mark.slow),
        *(pytest.param(each, (2,), marks=pytest.mark.slow) for each in RARER),
    ],
)
def test_two_ranks_make_the_tokens_of_transformers(family: str, sizes: tuple[int, ...]) -> None:
    """Of models that run by its modules, and of DeepSeek, whose latents are whole on every rank: shares of experts, or
    whole ones beside a share of those that all tokens take."""
    prompts = {f"g{length}": random_prompt(length, length) for length in LENGTHS[1:]}
    asked = [{"name": name, "prompt": prompt, "max_tokens": FEW} for name, prompt in prompts.items()]
    spec = {"model": tiny_hf_model(family), "sizes": sizes, "num_blocks": NUM_BLOCKS, "requests": asked}
    for two in run_in_child(spec):
        for name, prompt in prompts.items():
            check_greedy(tiny_hf_model(family), prompt, two["tokens"][f"0-{name}-0"], FEW)


def test_two_ranks_make_the_tokens_of_one_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """GPT-OSS, by shares of experts and by whole ones; biases behind a sum come once, sinks lie with their heads."""
    folder, twin = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    prompts = {f"g{length}": random_prompt(length, length) for length in LENGTHS[1:]}
    asked = [{"name": name, "prompt": prompt, "max_tokens": FEW} for name, prompt in prompts.items()]
    for two in run_in_child({"model": folder, "sizes": (2, -2), "num_blocks": NUM_BLOCKS, "requests": asked}):
        for name, prompt in prompts.items():
            check_greedy(twin, prompt, two["tokens"][f"0-{name}-0"], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("olmo2", marks=pytest.mark.slow), "glm4_moe"])
def test_ranks_give_up_a_step_of_a_model_of_transformers(family: str) -> None:
    model, prompt = tiny_hf_model(family), random_prompt(33, 1)
    node = NodeChild(
        ("decode",), "auto", num_ranks=2, model=str(model), faults=[{"rank": 1, "num_tokens": 33, "at": "sum"}]
    )
    (info,), client = node.infos, Client(node.infos[0])
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    try:
        lost = client.submit("lost", prompt, sampling, decode=info)
        client.wait(lost)
        assert lost.failed is not None
        again = client.submit("again", prompt, sampling, decode=info)
        client.wait(again)
        check_greedy(model, prompt, again.output(), 8)
    finally:
        client.close()
        node.stop()


FAULTS = [
    {"rank": rank, "num_tokens": num, "at": at}
    for rank, num, at in ((1, 33, "graph"), (0, 34, "last"), (1, 35, "last"))
]


@pytest.fixture(scope="module")
def failing_node() -> Iterator[NodeChild]:
    node = NodeChild(("decode",), "auto", num_ranks=2, model=str(tiny_model("llama")), faults=FAULTS)
    yield node
    node.stop()


@pytest.mark.parametrize("fault", FAULTS, ids=["1-graph", "0-last", "1-last"])
def test_ranks_give_up_a_prompt_of_graphs_together_and_go_on(failing_node: NodeChild, fault: dict[str, Any]) -> None:
    """The other rank exchanges as many rows as its graphs have, 64, and behind them as many as are wanted, one."""
    num_tokens = fault["num_tokens"]
    model, prompt = tiny_model("llama"), random_prompt(num_tokens, num_tokens)
    (info,), client = failing_node.infos, Client(failing_node.infos[0])
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def tokens_of(name: str, asked: list[int]) -> list[int]:
        result = client.submit(name, asked, sampling, decode=info)
        client.wait(result)
        assert result.failed is None
        return result.output()

    try:
        other = random_prompt(40, num_tokens + 100)  # no test finds another's in the cache
        check_greedy(model, other, tokens_of(f"before-{num_tokens}", other), 8)
        lost = client.submit(f"lost-{num_tokens}", prompt, sampling, decode=info)
        client.wait(lost)
        assert lost.failed is not None
        assert lost.failed.code == "out_of_memory"
        check_greedy(model, prompt, tokens_of(f"again-{num_tokens}", prompt), 8)
    finally:
        client.close()


def test_ranks_take_part_in_what_is_measured_at_the_start(tmp_path: Path) -> None:
    """Steps of many sizes, the head's too, each with its exchanges; then the tokens are right."""
    model, head = walking_model(tmp_path / "model"), knowing_head(tmp_path / "head")
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 4})
    node = NodeChild(("unified",), "auto", num_ranks=2, model=str(model), speculative_config=config, measures=True)
    (info,), client = node.infos, Client(node.infos[0])
    try:
        result = client.submit("walk", PROMPT, GREEDY, decode=info)
        client.wait(result)
        assert result.output() == walk(int(next_tokens()[PROMPT[-1]]), GREEDY.max_tokens)
    finally:
        client.close()
        node.stop()


@pytest.mark.parametrize(
    ("role", "nodes"),
    [("unified", ()), pytest.param("decode", ("--prefill", "1", "--decode", "1"), marks=pytest.mark.slow)],
    ids=["single", "split"],
)
def test_a_rank_that_dies_takes_its_served_node_along(role: str, nodes: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    with RealCluster(model, "--tensor-parallel-size", "2", *nodes) as cluster:
        prompt = random_prompt(400, 1)
        check_greedy(model, prompt, cluster.tokens(prompt, 16)[0], 16)
        node = psutil.Process(cluster.pid_of(role))
        (rank,) = node.children()
        rank.send_signal(signal.SIGKILL)
        wait_until_gone(node.pid)
