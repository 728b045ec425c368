"""Greedy tokens equal transformers' generate: single node and split over local, shm and tcp, in one process.

A pairwise cover of model × way × caching × chunk × pool: every pair of values meets in at least one run. `make test`
makes its first runs, in which each way meets caching or none, a small pool and a large one, and all values come.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import Greedy, random_prompt, reference_greedy, tiny_model

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 15, 16, 17, 100, 333, 700)
NUM_TOKENS = 64
NUM_AGAIN = 8  # of a prompt that is found cached
NUM_QUICK = 8  # runs of `make test`
FACTORS = {
    "model": ("demo", "llama", "mistral", "qwen2", "qwen3"),
    "way": ("single", "local", "shm", "tcp"),
    "chunk": (16, 64, 0),
    "caching": (True, False),
    "num_blocks": (256, 50),  # 50: the small prompts fit together but not with their output, so some are preempted
}


def pairwise() -> list[tuple]:
    """Greedy cover: each next run is the one with the most pairs not seen yet. Deterministic."""
    names = list(FACTORS)
    runs = list(itertools.product(*FACTORS.values()))

    def pairs(run: tuple) -> set:
        return {(i, run[i], j, run[j]) for i, j in itertools.combinations(range(len(names)), 2)}

    missing = set().union(*map(pairs, runs))
    chosen = []
    while missing:
        best = max(runs, key=lambda run: len(pairs(run) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def folder_of(model: str) -> Path:
    return DEMO if model == "demo" else tiny_model(model)


@cache
def references(model: str) -> dict[int, tuple[list[int], Greedy]]:
    vocab = 2048 if model == "demo" else 512
    prompts = {length: random_prompt(length, seed=length, vocab_size=vocab) for length in LENGTHS}
    made = {n: (p, reference_greedy(folder_of(model), p, NUM_TOKENS)) for n, p in prompts.items()}
    assert min(greedy.min_gap for _, greedy in made.values()) >= 1e-3, "the reference itself is not clear"
    if model != "demo":
        assert max(greedy.num_distinct for _, greedy in made.values()) >= 20, "the test would not bite"
    return made


def test_the_cover_is_small_and_its_first_runs_are_enough() -> None:
    assert len(pairwise()) <= 40
    quick = pairwise()[:NUM_QUICK]
    for index, values in enumerate(FACTORS.values()):
        assert {run[index] for run in quick} == set(values)
    for index, name in ((3, "caching"), (4, "num_blocks")):
        assert {(run[1], run[index]) for run in quick} == set(itertools.product(FACTORS["way"], FACTORS[name]))


# README says: "Greedy tokens equal transformers' (fp32, CPU)"
@pytest.mark.parametrize(
    tuple(FACTORS),
    [*pairwise()[:NUM_QUICK], *(pytest.param(*run, marks=pytest.mark.slow) for run in pairwise()[NUM_QUICK:])],
)
def test_greedy_equals_transformers(model: str, way: str, chunk: int, caching: bool, num_blocks: int) -> None:
    common = {"num_blocks": num_blocks, "caching": caching, "chunk": chunk}
    if way == "single":
        nodes = [Node(node_options("unified", folder_of(model), **common))]
    else:
        kinds = ("decode", "prefill")
        nodes = [Node(node_options(role, folder_of(model), transport=way, **common)) for role in kinds]
    prefill = nodes[1].info if len(nodes) > 1 else None
    with client_of(nodes) as client:
        for turn, num_tokens in enumerate((NUM_TOKENS, NUM_AGAIN) if caching else (NUM_TOKENS,)):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            with nodes[0].holding_until_accepted(client) if way == "single" else nullcontext():
                results = {
                    length: client.submit(f"{turn}-{length}", prompt, sampling, decode=nodes[0].info, prefill=prefill)
                    for length, (prompt, _) in references(model).items()
                }
            client.wait()
            for length, (_, greedy) in references(model).items():
                assert results[length].failed is None, results[length].failed
                assert results[length].output() == greedy.token_ids[:num_tokens], f"prompt of {length} tokens"
        if way == "single" and num_blocks == 50:
            assert nodes[0].process.logic.scheduler.state.num_preemptions > 0, "the small pool forced no preemption"
        if way != "single":
            commits = nodes[0].process.logic.handoffs.sink.counters.commits
            assert commits >= len(LENGTHS), "the KV was not handed over"
