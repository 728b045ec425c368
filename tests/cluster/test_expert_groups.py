"""Nodes that share a mixture's experts out and have requests of their own: the tokens of one node that has them all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from expert_nodes import group_of, start_children, start_group, stop_group
from mtp_heads import random_mtp
from quantised_checkpoints import mxfp4_folders, quantised_folders
from split_pair import GREEDY, SAMPLED, changed
from tiny_hf_models import tiny_hf_model
from waiting import wait_until, wait_until_gone

from in_process_cluster import Client, Node, node_options
from real_cluster import RealCluster
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import NodeInfo
from tiny_models import check_greedy, random_prompt, tiny_model

MODEL = "qwen3_moe"
LENGTHS = (1, 17, 64, 150)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    with group_of("unified", tiny_model(MODEL), chunk=64) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def one() -> Iterator[Node]:
    node = Node(node_options("unified", tiny_model(MODEL), chunk=64))
    yield node
    node.stop()


@pytest.fixture
def client(pair: list[Node], one: Node) -> Iterator[Client]:
    made = Client(*(node.info for node in (*pair, one)))
    yield made
    made.close()


def test_each_answers_its_own_requests(pair: list[Node], client: Client) -> None:
    """All at once, then again, when prompts are found in each node's own cache."""
    for turn in range(2):
        results = [
            (length, client.submit(f"{turn}-{length}-{i}", random_prompt(length, length), GREEDY, decode=node.info))
            for length in LENGTHS
            for i, node in enumerate(pair)
        ]
        client.wait()
        for length, result in results:
            assert result.failed is None
            check_greedy(tiny_model(MODEL), random_prompt(length, length), result.output(), 24)
    assert all(node.process.pool.num_cached for node in pair)


@pytest.mark.parametrize("busy", [0, 1])
def test_an_idle_node_goes_along(pair: list[Node], client: Client, busy: int) -> None:
    prompt = random_prompt(33, seed=7 + busy)
    result = client.submit(f"busy-{busy}", prompt, GREEDY, decode=pair[busy].info)
    client.wait(result)
    check_greedy(tiny_model(MODEL), prompt, result.output(), 24)


def test_drawn_tokens_and_probabilities_are_those_of_one_node(pair: list[Node], one: Node, client: Client) -> None:
    sampling = changed(SAMPLED, num_logprobs=2)
    results = [
        client.submit(f"drawn-{i}", random_prompt(40, seed=3), sampling, decode=node.info, samples=(0, 1, 2))
        for i, node in enumerate((*pair, one))
    ]
    client.wait()
    outputs = [[result.output(sample) for sample in (0, 1, 2)] for result in results]
    assert outputs[0] == outputs[1] == outputs[2]
    here, there = (
        [entry.logprobs[0] for sample in (0, 1, 2) for entry in result.logprobs[sample]] for result in results[1:]
    )
    assert here == pytest.approx(there, abs=1e-4)


def test_a_prefix_is_pulled_and_a_running_sequence_moves_within_the_group(pair: list[Node], client: Client) -> None:
    source, target = (node.info for node in pair)
    prompt, sampling = random_prompt(150, seed=51), changed(GREEDY, max_tokens=60)
    client.wait(client.submit("held", prompt, changed(GREEDY, max_tokens=4), decode=source))
    pulled = client.submit("pulled", prompt, changed(GREEDY, max_tokens=16), decode=target, holder=source)
    client.wait(pulled)
    assert pulled.num_reused_tokens == 144  # nine blocks of 16
    check_greedy(tiny_model(MODEL), prompt, pulled.output(), 16)
    prompt = random_prompt(100, seed=52)
    result = client.submit("moves", prompt, sampling, decode=source)
    client.until(lambda: len(result.tokens.get(0, ())) >= 3)
    moved = client.migrate(result, 0, prompt, sampling, source, target)
    client.until(lambda: moved.done and bool(result.migrated))
    tokens = {**result.tokens[0], **moved.tokens[0]}
    check_greedy(tiny_model(MODEL), prompt, [tokens[i] for i in range(60)], 60)


def test_experts_are_counted_by_node(pair: list[Node], client: Client) -> None:
    """Each counts what its own tokens chose."""
    node = pair[0]
    client.wait(client.submit("counted", random_prompt(400, seed=9), GREEDY, decode=node.info))
    client.until(lambda: "expert_imbalance" in client.statuses[node.info.node_id].counters)
    figures = client.statuses[node.info.node_id].counters
    assert 1 < figures["expert_rank_imbalance"] < figures["expert_imbalance"] < 6
    assert figures["expert_tokens"] > 0


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["deepseek_v2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_groups_of_prefill_and_of_decode_nodes(kind: str, transport: str) -> None:
    """Two prefill nodes share experts out, and three decode nodes; any of the one hands over to any of the other."""
    folder = tiny_hf_model(kind) if kind.startswith("deepseek") else tiny_model(kind)
    with (
        group_of("prefill", folder, 2, transport=transport, chunk=64) as prefill,
        group_of("decode", folder, 3, transport=transport) as decode,
    ):
        check_hand_overs(folder, [node.info for node in prefill], [node.info for node in decode])


def test_groups_of_experts_in_mxfp4(tmp_path: Path) -> None:
    folder, twin = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    with group_of("prefill", folder, 2, chunk=64) as prefill, group_of("decode", folder, 2) as decode:
        check_hand_overs(twin, [node.info for node in prefill], [node.info for node in decode])


@pytest.mark.parametrize(
    ("kind", "guesses"),
    [("gpt_oss", False), *(pytest.param("glm4_moe", guesses, marks=pytest.mark.slow) for guesses in (False, True))],
    ids=["gpt_oss", "glm", "glm-guesses"],
)
def test_groups_of_models_that_run_by_transformers_modules(kind: str, guesses: bool, tmp_path: Path) -> None:
    """In processes of their own, since transformers loads one model at a time. One computes for the other, and guesses
    for itself."""
    folder = served = tiny_hf_model(kind)
    config = '{"method": "mtp", "num_speculative_tokens": 2}' if guesses else ""
    if guesses:
        served = random_mtp(tmp_path, kind).served
    children = start_children("unified", str(served), transport="shm", speculative_config=config)
    nodes = [child.infos[0] for child in children]
    try:
        check_hand_overs(folder, nodes[:1], nodes[1:])
        check_hand_overs(folder, nodes[1:], nodes[:1])
        if guesses:
            check_guessed(nodes[0])
    finally:
        for child in children:
            child.stop()


def check_guessed(node: NodeInfo) -> None:
    client = Client(node)
    try:
        client.until(lambda: node.node_id in client.statuses)
        assert client.statuses[node.node_id].counters["spec_draft_tokens"] > 0
    finally:
        client.close()


def check_hand_overs(folder: Path, prefill: list[NodeInfo], decode: list[NodeInfo]) -> None:
    """Prompts of all lengths on each prefill node, at once."""
    asked = [(length, i) for length in LENGTHS for i in range(len(prefill))]
    client = Client(*prefill, *decode)
    try:
        results = [
            client.submit(
                f"{prefill[0].node_id}-{length}-{i}",
                random_prompt(length, length + i),
                GREEDY,
                decode=decode[(length + i) % len(decode)],
                prefill=prefill[i],
            )
            for length, i in asked
        ]
        client.wait()
    finally:
        client.close()
    for (length, i), result in zip(asked, results, strict=True):
        assert result.failed is None
        check_greedy(folder, random_prompt(length, length + i), result.output(), 24)


def check_one_of_each(nodes: list[Node], prompts: list[list[int]], reference: Path, num_tokens: int) -> None:
    """Each node answers one of the prompts, all at once, as `reference` does."""
    client = Client(*(node.info for node in nodes))
    try:
        results = [
            client.submit(f"r{i}", prompt, changed(GREEDY, max_tokens=num_tokens), decode=node.info)
            for i, (node, prompt) in enumerate(zip(nodes, prompts, strict=True))
        ]
        client.wait()
    finally:
        client.close()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.failed is None
        check_greedy(reference, prompt, result.output(), num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), [(MODEL, "fp8_blocks"), ("mixtral_64", "awq")])
def test_quantised_experts_in_a_group(kind: str, form: str, tmp_path: Path) -> None:
    folder, twin = quantised_folders(tiny_model(kind), tmp_path, form)
    with group_of("unified", folder) as nodes:
        check_one_of_each(nodes, [random_prompt(length, length) for length in (17, 60)], twin, 24)


@pytest.mark.slow
def test_guesses_in_a_group() -> None:
    """Look-ups on one node while the other has none, over the same text again and again."""
    folder = tiny_model(MODEL)
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    with group_of("unified", folder, speculative_config=speculative) as nodes:
        check_one_of_each(nodes, [random_prompt(8, seed=5) * 6, random_prompt(50, seed=6)], folder, 64)


def test_a_drained_node_stays_until_the_others_need_it_no_more() -> None:
    folder = tiny_model(MODEL)
    nodes = start_group("unified", folder)
    client = Client(*(node.info for node in nodes))
    try:
        long = changed(GREEDY, max_tokens=200)
        result = client.submit("long", random_prompt(20, seed=1), long, decode=nodes[1].info)
        client.until(lambda: bool(result.tokens))
        nodes[0].process.loop.begin_drain()
        wait_until(lambda: nodes[0].process.logic.draining)
        late = client.submit("late", random_prompt(9, seed=2), GREEDY, decode=nodes[0].info)
        client.until(lambda: late.failed is not None)
        assert late.failed is not None
        assert late.failed.code == "draining"
        client.wait(result)
        check_greedy(folder, random_prompt(20, seed=1), result.output(), 200)
    finally:
        client.close()
        stop_group(nodes)


@pytest.mark.slow
def test_a_killed_node_takes_its_group_along_and_all_start_again() -> None:
    """Under `tandem serve`: requests fail or go elsewhere, and the group meets anew."""
    folder = tiny_model(MODEL)
    with RealCluster(folder, "--data-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu") as cluster:
        cluster.wait_until_ready(num_nodes=2)
        prompts = [random_prompt(30, seed=seed) for seed in range(4)]
        for prompt in prompts:
            check_greedy(folder, prompt, cluster.tokens(prompt, 16)[0], 16)
        pids = [cluster.pid_of("unified", index) for index in range(2)]
        os.kill(pids[0], signal.SIGKILL)
        for pid in pids:
            wait_until_gone(pid)
        wait_until(lambda: cluster.num_nodes() == 2)
        assert "of the group ended; this process ends" in cluster.log()
        for prompt in prompts:
            check_greedy(folder, prompt, cluster.tokens(prompt, 16)[0], 16)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("llama", {}, "no experts"),
        (MODEL, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        (MODEL, {"compile": True}, "--compile"),
        (MODEL, {"data_parallel_rank": 2}, "give 0 to 1"),
        ("llama", {"enable_expert_parallel": False}, "only where they share experts out"),
        (MODEL, {"data_parallel_rpc_port": 0}, "give --data-parallel-rpc-port"),
    ],
)
def test_what_cannot_be_is_refused(model: str, changes: dict, said: str) -> None:
    from tandem.node.setup import load

    place = {"data_parallel_size": 2, "data_parallel_rpc_port": 1, "enable_expert_parallel": True}
    options = node_options("unified", tiny_model(model), **{**place, **changes})
    with pytest.raises(ConfigError, match=said):
        load(options)


def test_nodes_beyond_the_experts_are_refused() -> None:
    from tandem.engine.parallel.sharding import Shard
    from tandem.node.setup import load_config

    options = node_options("unified", tiny_model(MODEL))
    config = load_config(tiny_model(MODEL), options.model)
    with pytest.raises(ConfigError, match="experts"):
        Shard(expert_parallel=True, group_size=1000).config(config)  # type: ignore[arg-type]


def test_threads_of_a_group_end() -> None:
    def agreeing() -> int:
        return sum(thread.name == "step-agreement" for thread in threading.enumerate())

    before = agreeing()
    with group_of("unified", tiny_model(MODEL)):
        assert agreeing() == before + 2
    assert agreeing() == before
