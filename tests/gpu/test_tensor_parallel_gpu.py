"""Ranks on GPUs of their own: exact exchanges, and the tokens that one GPU makes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from gpu_ranks import run_ranks
from near_ties import check_against_reference
from tensor_parallel_engine import run_in_child
from waiting import wait_until_gone

import tandem.deploy
from real_cluster import RealCluster
from tiny_models import random_prompt, reference_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 17, 64, 333)
NUM_TOKENS = 48
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_exchanges_are_exact_eager_and_replayed(num_ranks: int) -> None:
    took = run_ranks(num_ranks)
    for rows, times in took.items():
        listed = ", ".join(f"{way} {time:.1f}" for way, time in times.items())
        print(f"\n{num_ranks} ranks, {rows} rows of 4096, sum and norm, us: {listed}", end="")


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """For the small models on CPU: a thread for each of many cores makes them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, before))
    yield
    torch.set_num_threads(before)


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


def test_a_rank_without_memory_ends_its_step_and_not_the_node() -> None:
    """The other GPUs wait in their sums for rows that it can't compute. Prompts that tell log-probabilities run layer
    by layer, others as graphs."""
    last, asks, drawn = SIZES[-1] - 1, {"num_prompt_logprobs": 1}, {"temperature": 1.0, "seed": 5}
    faults = [
        {"rank": last, "num_tokens": 33, "at": 0, **asks},
        {"rank": last, "num_tokens": 35, "at": 4, **asks},
        {"rank": 0, "num_tokens": 37, "at": 2, **asks},
        {"rank": last, "num_tokens": 39, "at": "gather", **drawn},
        {"rank": 0, "num_tokens": 41, "at": "sample", **drawn},
    ]
    lengths = [fault["num_tokens"] for fault in faults]
    settings = [{key: fault[key] for key in fault.keys() - {"rank", "num_tokens", "at"}} for fault in faults]
    prompts = [random_prompt(n, seed=n, vocab_size=2048) for n in lengths]
    requests = [
        {"name": str(n), "prompt": prompt, "max_tokens": 8, **more}
        for n, prompt, more in zip(lengths, prompts, settings, strict=True)
    ]
    spec = {"model": DEMO, "dtype": "float32", "device": "cuda", "num_blocks": 256, "rounds": 2, "requests": requests}
    (result,) = run_in_child({**spec, "sizes": [SIZES[-1]], "faults": faults})
    assert result["failed"] == {f"0-{length}": "out_of_memory" for length in lengths}
    assert result["steps_out_of_memory"] == len(faults)
    assert result["num_cached"] == 0
    for length, prompt in list(zip(lengths, prompts, strict=True))[:3]:
        check_against_reference(DEMO, prompt, result["tokens"][f"1-{length}-0"], torch.float32)
    assert [len(result["tokens"][f"1-{length}-0"]) for length in lengths] == [8] * len(lengths)


def test_a_rank_that_dies_takes_its_node_along() -> None:
    """In the middle of a request, when the other GPU soon waits for a row that never comes."""
    with RealCluster(DEMO, "--tensor-parallel-size", "2", "--device", "cuda") as cluster:
        assert len(cluster.tokens(random_prompt(20, 1), 8)[0]) == 8
        node = psutil.Process(cluster.pid_of("unified"))
        (rank,) = [child for child in node.children() if "ranks.main" in " ".join(child.cmdline())]

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                cluster.complete(random_prompt(20, 2), max_tokens=1900)

        request = threading.Thread(target=ask)
        request.start()
        time.sleep(0.1)
        rank.send_signal(signal.SIGKILL)
        wait_until_gone(node.pid)
    request.join()
