"""A model whose layers are block-sparse, by a field of its config.json: on one node, split, and on
two ranks its tokens are those that transformers makes with the pattern as a mask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from split_pair import GREEDY, make_pair
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
    with make_pair("local", model=folder, decode={"num_blocks": 64}, prefill={"num_blocks": 64, "chunk": 64}) as pair:
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        split = [pair.submit(prompt, GREEDY) for prompt in prompts]
        alone = [pair.client.submit(f"alone-{len(p)}", p, GREEDY, decode=pair.decode.info) for p in prompts]
        pair.client.wait()
        for prompt, *results in zip(prompts, split, alone, strict=True):
            for result in results:
                assert result.failed is None, result.failed
                assert result.output() == best_tokens(prompt, result.output())
        pair.check_whole()
    dense = reference_model(tiny_model("llama"))(torch.tensor([[*prompts[-1], *split[-1].output()]])).logits[0]
    assert dense[len(prompts[-1]) - 1 : -1].argmax(-1).tolist() != split[-1].output(), "the pattern changes nothing"


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
