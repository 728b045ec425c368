"""Ranks on GPUs of their own: exact exchanges, and the tokens that one GPU makes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from gpu_ranks import run_ranks
from near_ties import check_against_reference
from node_child import NodeChild
from quantised_checkpoints import mxfp4_folders
from tensor_parallel_engine import run_in_child
from tiny_hf_models import tiny_hf_model
from waiting import wait_until_gone

import tandem.deploy
from in_process_cluster import Client
from real_cluster import RealCluster
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt, reference_greedy, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.usefixtures("few_threads"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 17, 64, 333)
NUM_TOKENS = 48
DRAWN = {"temperature": 1.0, "seed": 5}
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]


def rank_of(pid: int) -> psutil.Process:
    """The other rank of the node of two whose rank 0 is this process."""
    children = psutil.Process(pid).children()
    (rank,) = [child for child in children if "tandem.node.ranks.main" in " ".join(child.cmdline())]
    return rank


@pytest.mark.parametrize("num_ranks", SIZES)
def test_exchanges_are_exact_eager_and_replayed(num_ranks: int) -> None:
    took = run_ranks(num_ranks)
    for rows, times in took.items():
        listed = ", ".join(f"{way} {time:.1f}" for way, time in times.items())
        print(f"\n{num_ranks} ranks, {rows} rows of 4096, sum and norm, us: {listed}", end="")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_against_fp32(dtype: str) -> None:
    """Chunked prompts, then decode steps from graphs; twice, so that prompts are found in the cache."""
    prompts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in LENGTHS}
    requests = [{"name": str(n), "prompt": prompts[n], "max_tokens": NUM_TOKENS} for n in LENGTHS]
    drawn = {"name": "drawn", "prompt": random_prompt(20, 1), "max_tokens": 16, "temperature": 1.0, "seed": 5}
    spec = {"model": DEMO, "dtype": dtype, "device": "cuda", "num_blocks": 256, "rounds": 2}
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(run_in_child, {**spec, "sizes": [SIZES[-1]], "requests": [*requests, drawn]})
        for prompt in prompts.values():  # meanwhile; they are kept
            reference_greedy(DEMO, prompt, NUM_TOKENS)
        (result,) = results.result()
    for turn in range(2):
        for length, prompt in prompts.items():
            check_against_reference(DEMO, prompt, result["tokens"][f"{turn}-{length}-0"], getattr(torch, dtype))
    assert len(result["tokens"]["1-drawn-0"]) == 16
    assert result["num_cached"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_prompts_are_graphs_on_every_rank(dtype: str) -> None:
    """In 16 bits with their attention, in 32 between attentions."""
    prompts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in (600, 900, 1500)}
    requests = [{"name": str(n), "prompt": prompt, "max_tokens": 16} for n, prompt in prompts.items()]
    spec = {"model": DEMO, "dtype": dtype, "device": "cuda", "num_blocks": 256, "num_batched_tokens": 2048}
    (result,) = run_in_child({**spec, "sizes": [SIZES[-1]], "requests": requests})
    assert result["num_launched"] == 0
    for length, prompt in prompts.items():
        check_against_reference(DEMO, prompt, result["tokens"][f"0-{length}-0"], getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_experts_on_ranks_make_the_tokens_of_one(dtype: str) -> None:
    """Steps of few rows and of many, from graphs. In 16 bits only that they run: a rounding changes experts."""
    folder = tiny_model("mixtral")
    prompts = {n: random_prompt(n, seed=n) for n in (1, 5, 17, 90, 300)}
    requests = [{"name": str(n), "prompt": prompt, "max_tokens": 32} for n, prompt in prompts.items()]
    spec = {"model": folder, "dtype": dtype, "device": "cuda", "num_blocks": 256}
    (result,) = run_in_child({**spec, "sizes": [-SIZES[-1]], "requests": requests})
    for length, prompt in prompts.items():
        tokens = result["tokens"][f"0-{length}-0"]
        assert len(tokens) == 32
        if dtype == "float32":
            check_greedy(folder, prompt, tokens, 32)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("deepseek_v2", "float32"), ("deepseek_v3", "float32"), ("deepseek_v3", "bfloat16")]
)
def test_whole_experts_beside_a_share_of_those_that_all_tokens_take(kind: str, dtype: str) -> None:
    """Of V2 each of two ranks has a shared expert among its others, of V3 half of one, as an MLP. In 16 bits only that
    they run."""
    folder = tiny_hf_model(f"{kind}_real_heads")
    prompts = {n: random_prompt(n, seed=n) for n in (1, 5, 17, 90, 300)}
    requests = [{"name": str(n), "prompt": prompt, "max_tokens": 24} for n, prompt in prompts.items()]
    spec = {"model": folder, "dtype": dtype, "device": "cuda", "num_blocks": 256}
    (result,) = run_in_child({**spec, "sizes": [-2], "requests": requests})
    for length, prompt in prompts.items():
        tokens = result["tokens"][f"0-{length}-0"]
        assert len(tokens) == 24
        if dtype == "float32":
            check_against_reference(folder, prompt, tokens, torch.float32)


@pytest.mark.parametrize("size", [2, -2])
def test_ranks_of_experts_in_mxfp4_make_the_tokens_of_one(size: int, tmp_path: Path) -> None:
    """GPT-OSS with sinks, by shares of experts and by whole ones."""
    folder, twin = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    prompts = {n: random_prompt(n, seed=n) for n in (1, 5, 17, 90, 300)}
    requests = [{"name": str(n), "prompt": prompt, "max_tokens": 24} for n, prompt in prompts.items()]
    spec = {"model": folder, "dtype": "float32", "device": "cuda", "num_blocks": 256}
    (result,) = run_in_child({**spec, "sizes": [size], "requests": requests})
    for length, prompt in prompts.items():
        check_against_reference(twin, prompt, result["tokens"][f"0-{length}-0"], torch.float32)


@pytest.mark.parametrize(
    ("rank", "at", "asks", "num_tokens"),
    [
        (1, 2, {"num_prompt_logprobs": 1}, 33),
        (1, "gather", DRAWN, 33),
        (0, "sample", DRAWN, 33),
        (1, "graph", DRAWN, 700),
        (0, "last", {}, 700),
    ],
)
def test_ranks_give_up_a_step_together_and_go_on(
    rank: int, at: int | str, asks: dict[str, Any], num_tokens: int
) -> None:
    """The other GPU waits for its part of the step, and gets zeros. A prompt that tells log-probabilities runs layer by
    layer, others as graphs, short ones as rows of a decode step."""
    sizes = {"num_ranks": 2, "model": str(DEMO), "dtype": "float32", "chunk": 1024}
    faults = [{"rank": rank, "num_tokens": num_tokens, "at": at}]
    node = NodeChild(("decode",), "auto", faults=faults, **sizes)  # type: ignore[arg-type]
    (info,), client = node.infos, Client(node.infos[0])
    plain = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    prompt = random_prompt(num_tokens, 1, 2048)
    try:
        lost = client.submit("lost", prompt, SamplingParams(**{**plain, **asks}), decode=info)
        client.wait(lost)
        assert lost.failed is not None
        assert lost.failed.code == "out_of_memory"
        again = client.submit("again", prompt, SamplingParams(**plain), decode=info)
        client.wait(again)
        check_against_reference(DEMO, prompt, again.output(), torch.float32)
    finally:
        client.close()
        node.stop()


def test_a_rank_that_dies_takes_its_node_along() -> None:
    """In the middle of a request, when the other GPU soon waits for a row that never comes."""
    with RealCluster(DEMO, "--tensor-parallel-size", "2", "--device", "cuda") as cluster:
        assert len(cluster.tokens(random_prompt(20, 1), 8)[0]) == 8
        node = psutil.Process(cluster.pid_of("unified"))
        rank = rank_of(node.pid)

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                cluster.complete(random_prompt(20, 2), max_tokens=1900)

        request = threading.Thread(target=ask)
        request.start()
        time.sleep(0.1)
        rank.send_signal(signal.SIGKILL)
        wait_until_gone(node.pid)
    request.join()
