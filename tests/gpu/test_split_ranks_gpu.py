"""Hand-offs between nodes of one and two GPUs: heads split and merged on the way, the tokens of one model on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from near_ties import check_against_reference
from node_child import NodeChild

import tandem.deploy
from in_process_cluster import Client
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.contracts.wire.requests import FlushBlocks
from tiny_models import check_greedy, random_prompt, reference_greedy, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.xdist_group("split_ranks"),  # nodes that all tests ask
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 17, 64, 333)  # chunks are of 64 tokens
NUM_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SECOND = 2 if torch.cuda.device_count() >= 4 else 0  # first GPU of decode nodes
FP8 = {"block_size": 32, "kv_cache_dtype": "fp8_e4m3"}
NODES: dict[str, dict[str, Any]] = {
    "prefill-1": {},
    "prefill-2": {"num_ranks": 2},
    "prefill-2-tiers": {"num_ranks": 2, "num_blocks": 32, "host_tier_bytes": 256 << 20, "always_loads": True},
    "prefill-1-tcp": {"transport": "tcp"},
    "prefill-2-tcp": {"transport": "tcp", "num_ranks": 2},
    "decode-1": {"device_index": SECOND},
    "decode-2": {"device_index": SECOND, "num_ranks": 2},
    "decode-1-fp8": {"device_index": SECOND, **FP8},
    "decode-2-fp8": {"device_index": SECOND, "num_ranks": 2, **FP8},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, NodeInfo]]:
    """All at once: each takes most of its start to compile."""

    def start(name: str) -> NodeChild:
        options = {"transport": "auto", "model": str(DEMO), "dtype": "float32", **NODES[name]}
        return NodeChild((name.split("-")[0],), options.pop("transport"), **options)

    with ThreadPoolExecutor(len(NODES)) as pool:
        started = {name: pool.submit(start, name) for name in NODES}
        for length in LENGTHS:  # meanwhile; they are kept
            reference_greedy(DEMO, random_prompt(length, length, 2048), NUM_TOKENS)
    try:
        yield {name: child.result().infos[0] for name, child in started.items()}
    finally:
        for child in started.values():
            if child.exception() is None:
                child.result().stop()


def run_all(prefill: NodeInfo, decode: NodeInfo, name: str) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of all prompts, and the decode node's counters after them."""
    client = Client(decode, prefill)
    try:
        results = [
            client.submit(f"{name}-{n}", random_prompt(n, n, 2048), GREEDY, decode=decode, prefill=prefill)
            for n in LENGTHS
        ]
        client.wait()
        client.statuses.clear()
        while not {decode.node_id, prefill.node_id} <= client.statuses.keys():
            client.poll(0.1)
        counters = {**client.statuses[prefill.node_id].counters, **client.statuses[decode.node_id].counters}
    finally:
        client.close()
    assert [result.failed for result in results] == [None] * len(LENGTHS)
    return [result.output() for result in results], counters


@pytest.mark.parametrize("way", ["", "-tcp"], ids=["cuda_ipc", "tcp"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_may_differ(nodes: dict[str, NodeInfo], num_prefill: int, num_decode: int, way: str) -> None:
    """Twice: the second time both sides find what they keep, and push and compute only the rest."""
    prefill, decode = nodes[f"prefill-{num_prefill}{way}"], nodes[f"decode-{num_decode}"]
    for turn in range(2):
        outputs, counters = run_all(prefill, decode, f"{num_prefill}-{num_decode}{way}-{turn}")
        assert counters["kv_blocks_bad"] == 0
        for length, tokens in zip(LENGTHS, outputs, strict=True):
            check_against_reference(DEMO, random_prompt(length, length, 2048), tokens, torch.float32)
    assert counters["kv_blocks_verified"] > 0


@pytest.mark.parametrize("way", ["", "-tcp"], ids=["cuda_ipc", "tcp"])
def test_blocks_and_numbers_may_differ_too(nodes: dict[str, NodeInfo], way: str) -> None:
    """fp8 in larger blocks. Ranks round sums elsewhere, which may turn an fp8 number, and with it a prompt's tokens."""
    one, _ = run_all(nodes["prefill-1"], nodes["decode-1-fp8"], f"fp8-1{way}")
    for ranks in (1, 2):
        many, _ = run_all(nodes[f"prefill-{ranks}{way}"], nodes["decode-2-fp8"], f"fp8-{ranks}-2{way}")
        assert sum(ours == theirs for ours, theirs in zip(one, many, strict=True)) >= len(LENGTHS) - 1


def test_what_two_ranks_have_no_room_for_comes_back(nodes: dict[str, NodeInfo]) -> None:
    """From host memory, where it lies in whole blocks."""
    prefill, decode = nodes["prefill-2-tiers"], nodes["decode-1"]
    client = Client(decode, prefill)
    prompts = {seed: random_prompt(333, seed, 2048) for seed in (70, 71)}
    try:
        for turn in range(2):
            for seed, prompt in prompts.items():
                client.send(decode, FlushBlocks())
                result = client.submit(f"kept-{turn}-{seed}", prompt, GREEDY, decode=decode, prefill=prefill)
                client.wait(result)
                assert result.failed is None
                check_against_reference(DEMO, prompt, result.output(), torch.float32)
                kept = 20 * (1 if not turn and seed == 70 else 2)
                client.until(lambda: counter(client, prefill, "tier_host_blocks") >= kept)  # noqa: B023
        # The pool of 32 has kept the first 11 blocks of either prompt beside the other's 21: 9 of each come back.
        client.until(lambda: counter(client, prefill, "tier_host_hits") >= 2 * 9)
        assert not counter(client, prefill, "tier_loads_failed")
    finally:
        client.close()


def test_ranks_that_hold_copies_of_a_head_hand_over() -> None:
    """One KV head on two GPUs, as a source and as a sink."""
    options: dict[str, Any] = {"transport": "auto", "model": "llama_one_kv_head", "dtype": "float32"}
    with ThreadPoolExecutor(3) as pool:
        started = [
            pool.submit(NodeChild, (role,), num_ranks=ranks, **options)
            for role, ranks in (("prefill", 2), ("decode", 2), ("decode", 1))
        ]
    prefill, *decodes = (each.result() for each in started)
    prompt, sampling = random_prompt(150, 80), GREEDY
    client = Client(*(child.infos[0] for child in (prefill, *decodes)))
    try:
        for index, decode in enumerate(decodes):
            asked = client.submit(f"copies-{index}", prompt, sampling, decode=decode.infos[0], prefill=prefill.infos[0])
            client.wait(asked)
            assert asked.failed is None
            check_greedy(tiny_model("llama_one_kv_head"), prompt, asked.output(), NUM_TOKENS)
    finally:
        client.close()
        for child in (prefill, *decodes):
            child.stop()


def counter(client: Client, node: NodeInfo, name: str) -> float:
    return client.statuses[node.node_id].counters.get(name, 0.0) if node.node_id in client.statuses else 0.0


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1)])
def test_sequences_and_prefixes_move_to_another_number_of_ranks(
    nodes: dict[str, NodeInfo], here: int, there: int
) -> None:
    """While its source replays graphs; then a third of its tokens is pulled back as the prefix of another prompt."""
    source, target = nodes[f"decode-{here}"], nodes[f"decode-{there}"]
    prompt, long = random_prompt(100, seed=60 + here, vocab_size=2048), 300
    sampling = SamplingParams(max_tokens=long, temperature=0.0, ignore_eos=True)
    client = Client(source, target)
    try:
        result = client.submit(f"moves-{here}", prompt, sampling, decode=source)
        client.until(lambda: len(result.tokens.get(0, ())) >= 20)
        moved = client.migrate(result, 0, prompt, sampling, source, target)
        client.wait(moved)
        assert [message.reason for message in result.migrated] == [""]
        tokens = {**result.tokens[0], **moved.tokens[0]}
        output = [tokens[i] for i in range(long)]
        known = [*prompt, *output[:200]]
        pulled = client.submit(f"pulled-{here}", known, GREEDY, decode=source, holder=target)
        client.wait(pulled)
    finally:
        client.close()
    check_against_reference(DEMO, prompt, output, torch.float32)
    check_against_reference(DEMO, known, pulled.output(), torch.float32)
    assert pulled.num_reused_tokens >= 256, "neither kept nor pulled"
