"""Models compiled around attention: the same tokens as transformers', on one node and split, by few graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from split_pair import GREEDY, make_pair
from tiny_encoder_models import tiny_encoder_model
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Node, node_options
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.node.setup import load
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 90, 130)


def made(family: str) -> Path:
    return tiny_model(family) if family in ("llama", "qwen3") else tiny_hf_model(family)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", "eager"),  # what was traced, run as it is
        pytest.param("gpt2", "eager", marks=pytest.mark.slow),
        # which takes a C++ compiler a minute or two
        *(pytest.param(family, "inductor", marks=pytest.mark.slow) for family in ("qwen3", "gemma2")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(family: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    folder, sizes = made(family), {"num_blocks": 64, "compile": True}
    with make_pair("local", model=folder, decode=sizes, prefill={**sizes, "chunk": 64}) as pair:
        for node in (pair.decode, pair.prefill):
            node.process.runner.warmup()  # compiles, which may take longer than a client is patient
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        split = [pair.submit(prompt, GREEDY) for prompt in prompts]
        alone = [pair.client.submit(f"alone-{len(p)}", p, GREEDY, decode=pair.decode.info) for p in prompts]
        pair.client.wait()
        for prompt, *results in zip(prompts, split, alone, strict=True):
            for result in results:
                assert result.failed is None, result.failed
                check_greedy(folder, prompt, result.output(), GREEDY.max_tokens)
        pair.check_whole()
    assert counters["stats"]["unique_graphs"] <= 4, "of two nodes: not one for each size of a step"
    assert not counters["graph_break"]


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    lora = LoraOptions(enable_lora=True, max_loras=1, max_lora_rank=8)
    for folder, options, why in (
        (tiny_model("llama"), {"lora": lora}, "nor --enable-lora: leave one out"),
        (tiny_encoder_model("bart"), {}, "bart takes more than text"),
    ):
        with pytest.raises(ConfigError, match=why):
            load(node_options("unified", folder, compile=True, **options))


def test_a_pass_that_cannot_be_traced_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    node = Node(node_options("unified", tiny_model("llama"), compile=True))
    model = node.process.loaded.model
    monkeypatch.setattr(type(model.norm), "forward", lambda self, *more: print("a break"))
    with pytest.raises(ConfigError, match=r"--compile: torch\.compile can't make this model's pass: .*; leave it out"):
        node.process.runner.warmup()
    node.stop()
