"""Nodes on GPUs of their own that share a mixture's experts out: exact exchanges, and the tokens of one node."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from exchange_ranks import run_on_gpus
from near_ties import check_against_reference
from node_child import NodeChild
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Client
from tandem.deploy.redis_server import free_port
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]
LENGTHS = (1, 5, 17, 90, 300)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """For the small models on CPU: a thread for each of many cores makes them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, before))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_exchanges_are_exact_eager_and_replayed(num_ranks: int) -> None:
    took = run_on_gpus(num_ranks)
    listed = ", ".join(f"{rows}: {time:.1f}" for rows, time in took.items())
    print(f"\n{num_ranks} ranks, rows of 2048 there and back, us: {listed}", end="")


def run_group(folder: Path, dtype: str, role: str = "unified", **changes: object) -> list[list[list[int]]]:
    """What each of two nodes makes of all prompts: first one alone, then both at once."""
    port = free_port()

    def start(rank: int) -> NodeChild:
        place = {"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_rpc_port": port}
        return NodeChild(
            (role,), "auto", model=str(folder), dtype=dtype, device="cuda", device_index=rank,
            enable_expert_parallel=True, **place, **changes,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:
        children = list(threads.map(start, range(2)))
    client = Client(*(child.infos[0] for child in children))
    try:
        outputs: list[list[list[int]]] = []
        for turn, ranks in (("one", (1,)), ("both", (0, 1))):
            results = [
                [
                    client.submit(f"{turn}{rank}-{n}", random_prompt(n, n), GREEDY, decode=children[rank].infos[0])
                    for n in LENGTHS
                ]
                for rank in ranks
            ]
            client.wait()
            assert not [each.failed for own in results for each in own if each.failed]
            outputs += [[each.output() for each in own] for own in results]
    finally:
        client.close()
        for child in children:
            child.stop()
    return outputs


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen3_moe", "float32"), ("qwen3_moe", "bfloat16"), ("mixtral", "float32"), ("deepseek_v3", "float32")],
)
def test_nodes_that_share_experts_out_make_the_tokens_of_one(kind: str, dtype: str) -> None:
    """Prompts, then steps from graphs, alone and beside the other's. In 16 bits only that they run: a rounding changes
    experts."""
    folder = tiny_hf_model(f"{kind}_real_heads") if kind.startswith("deepseek") else tiny_model(kind)
    for outputs in run_group(folder, dtype):
        for length, tokens in zip(LENGTHS, outputs, strict=True):
            assert len(tokens) == 32
            if dtype == "float32" and kind.startswith("deepseek"):
                check_against_reference(folder, random_prompt(length, length), tokens, torch.float32)
            elif dtype == "float32":
                check_greedy(folder, random_prompt(length, length), tokens, 32)


def test_guesses_are_verified_together() -> None:
    folder = tiny_model("qwen3_moe")
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    for outputs in run_group(folder, "float32", speculative_config=speculative):
        for length, tokens in zip(LENGTHS, outputs, strict=True):
            check_greedy(folder, random_prompt(length, length), tokens, 32)
