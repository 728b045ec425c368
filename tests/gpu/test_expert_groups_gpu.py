"""Nodes on GPUs of their own that share a mixture's experts out: exact exchanges, and the tokens of one node."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from exchange_ranks import run_on_gpus
from expert_nodes import start_children
from near_ties import check_against_reference
from node_child import NodeChild
from quantised_checkpoints import quantised_folders
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Client
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.xdist_group("expert_groups"),  # nodes that all tests ask
    pytest.mark.usefixtures("few_threads"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]
LENGTHS = (1, 5, 17, 90, 300)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_exchanges_are_exact_eager_and_replayed(num_ranks: int) -> None:
    took = run_on_gpus(num_ranks)
    listed = ", ".join(f"{rows}: {time:.1f}" for rows, time in took.items())
    print(f"\n{num_ranks} ranks, rows of 2048 there and back, us: {listed}", end="")


GUESSES = '{"method": "ngram", "num_speculative_tokens": 3}'
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "qwen3_moe, guesses": ("qwen3_moe", {"dtype": "float32", "speculative_config": GUESSES}),
    "qwen3_moe, bf16": ("qwen3_moe", {"dtype": "bfloat16"}),
    "deepseek_v3": ("deepseek_v3_real_heads", {"dtype": "float32"}),
    "gpt_oss": ("gpt_oss", {"dtype": "float32"}),
    "fp8 blocks": ("qwen3_moe fp8_blocks", {"dtype": "bfloat16"}),
    "awq": ("mixtral_64 awq", {"dtype": "float16"}),
    "mxfp4": ("gpt_oss mxfp4", {"dtype": "float32"}),
}


def folders_of(kind: str, root: Path) -> tuple[Path, Path]:
    """The model's, and that of what its numbers stand for. `root`: for a quantised checkpoint, whose format stands
    behind its kind."""
    plain, _, form = kind.partition(" ")
    folder = tiny_hf_model(plain) if plain in ("gpt_oss", "deepseek_v3_real_heads") else tiny_model(plain)
    return quantised_folders(folder, root, form) if form else (folder, folder)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[NodeChild]]]]:
    """All at once: each takes most of its start to compile."""
    root = tmp_path_factory.mktemp("quantised")
    with ThreadPoolExecutor(len(GROUPS)) as threads:
        started = {
            name: threads.submit(start_children, "unified", str(folders_of(kind, root)[0]), device="cuda", **options)
            for name, (kind, options) in GROUPS.items()
        }
        yield started
    for children in started.values():
        for child in () if children.exception() else children.result():
            child.stop()


@pytest.mark.parametrize("name", GROUPS)
def test_nodes_that_share_experts_out_make_the_tokens_of_one(
    groups: dict[str, Future[list[NodeChild]]], name: str, tmp_path: Path
) -> None:
    """Prompts, then steps from graphs: first of one node while the other is idle, then of both. In 16 bits only that
    they run: a rounding changes experts."""
    kind, options = GROUPS[name]
    twin = folders_of(kind, tmp_path)[1]
    nodes = [child.infos[0] for child in groups[name].result()]
    client = Client(*nodes)
    try:
        for turn, ranks in (("one", (1,)), ("both", (0, 1))):
            results = {
                (rank, n): client.submit(f"{turn}{rank}-{n}", random_prompt(n, n), GREEDY, decode=nodes[rank])
                for rank in ranks
                for n in LENGTHS
            }
            client.wait()
            for (_, length), result in results.items():
                assert result.failed is None
                tokens = result.output()
                assert len(tokens) == 32
                if options["dtype"] == "float32" and kind == "qwen3_moe":
                    check_greedy(twin, random_prompt(length, length), tokens, 32)
                elif options["dtype"] == "float32":
                    check_against_reference(twin, random_prompt(length, length), tokens, torch.float32)
    finally:
        client.close()
