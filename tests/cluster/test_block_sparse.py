"""A model whose layers are block-sparse, by a field of its config.json: on one node, split, and on
two ranks its tokens are those that transformers makes with the pattern as a mask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from split_pair import run_both_ways
from tensor_parallel_engine import run_in_child

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import load_model_config
from tandem.kernels.reference.paged import sparse_positions
from tiny_models import random_prompt, reference_model, tiny_model

PATTERN = {"local_blocks": 2, "vert_stride": 3, "block_size": 16, "head_sliding_step": 1}
LENGTHS = (5, 90, 170)  # one within its local blocks, two beyond


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "sparse"
    shutil.copytree(tiny_model("llama"), made)
    raw = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**raw, "blocksparse_params": PATTERN}))
    return made


def best_tokens(prompt: list[int], output: list[int]) -> list[int]:
    """transformers' most likely token after the prompt and after each token of the output but the last."""
    model = reference_model(tiny_model("llama"))
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    length = len(prompt) + len(output)
    mask = torch.full((1, heads, length, length), torch.finfo(torch.float32).min)
    for head in range(heads):
        for query in range(length):
            mask[0, head, query, sparse_positions(query, head, heads, kv_heads, **PATTERN, tp_rank=0)] = 0.0
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]]), attention_mask=mask).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_one_node_and_a_split(folder: Path) -> None:
    for prompt, output in run_both_ways(folder, LENGTHS):
        assert output == best_tokens(prompt, output)
    dense = reference_model(tiny_model("llama"))(torch.tensor([[*prompt, *output]])).logits[0]
    assert dense[len(prompt) - 1 : -1].argmax(-1).tolist() != output, "the pattern changes nothing"


@pytest.mark.slow
def test_two_ranks(folder: Path) -> None:
    """Heads' shifts count over all ranks."""
    requests = [{"name": f"g{n}", "prompt": random_prompt(n, n), "max_tokens": 24} for n in LENGTHS]
    one, two = run_in_child({"model": folder, "sizes": [1, 2], "num_blocks": 64, "requests": requests})
    assert one == two


@pytest.mark.parametrize("wrong", [{"local_blocks": 0, "vert_stride": 1}, {"vert_stride": 2}, {**PATTERN, "other": 1}])
def test_a_pattern_that_is_none_is_refused(wrong: dict, folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "blocksparse_params": wrong}))
    with pytest.raises(CheckpointError, match="blocksparse_params"):
        load_model_config(tmp_path)
