"""Tokens guessed ahead change no output: greedy, drawn, guided, biased, penalised, forked; alone, split, preempted."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from eagle_heads import random_head
from llguidance import LLMatcher
from node_child import NodeChild
from safetensors.torch import load_file, save_file
from split_pair import changed
from tokenizers import Tokenizer

import tandem.deploy
from in_process_cluster import Client, Node, client_of, node_options
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.sampling_params import SamplingParams

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
GUESSING = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
LIST = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 6, "maxItems": 8}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = changed(GREEDY, temperature=0.7, seed=3)
ASKED: dict[str, tuple[SamplingParams, tuple[int, ...]]] = {
    "greedy": (GREEDY, (0,)),
    "drawn": (changed(DRAWN, top_p=0.9), (0, 1)),
    "logprobs": (changed(DRAWN, num_logprobs=2), (0,)),
    "penalised": (changed(GREEDY, frequency_penalty=0.1, repetition_penalty=1.02, presence_penalty=0.1), (0,)),
    "penalised and drawn": (changed(DRAWN, frequency_penalty=0.05), (0, 1)),
    "biased": (changed(GREEDY, logit_bias=((40, 2.0), (41, -3.0)), min_tokens=5, max_tokens=33), (0,)),
    "guided": (
        changed(DRAWN, grammar=LLMatcher.grammar_from_json_schema(LIST, overrides={"whitespace_flexible": False})),
        (0, 1),
    ),
    "held": (changed(DRAWN, allowed_token_ids=tuple(range(40, 60))), (0,)),
    "beams": (changed(GREEDY, beam_width=2, max_tokens=12), (0,)),
    "short": (changed(GREEDY, max_tokens=2), (0,)),
}
CODE = """def read_lines(path, encoding):
    with open(path, encoding=encoding) as file:
        return file.readlines()

"""
Outputs = dict[str, dict[int, tuple[list[int], str]]]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def prompt_of(name: str) -> list[int]:
    return tokenizer().encode(f"# {name}\n" + CODE * 3).ids


def serve(roles: list[str], speculative_config: str = GUESSING, **options: object) -> tuple[Outputs, dict[str, float]]:
    """What comes of all that is asked, with a stop id that the plain greedy output has, and the decoding node's
    counters."""
    nodes = [Node(node_options(role, DEMO, speculative_config=speculative_config, **options)) for role in roles]
    prefill = nodes[1].info if len(nodes) > 1 else None
    with client_of(nodes) as client:
        results = {}
        with nodes[0].holding_until_accepted(client) if "num_blocks" in options else nullcontext():
            for name, (sampling, samples) in ASKED.items():
                prompt, decode = prompt_of(name), nodes[0].info
                results[name] = client.submit(name, prompt, sampling, decode=decode, prefill=prefill, samples=samples)
        client.wait()
        for name, result in results.items():
            assert result.failed is None, f"{name}: {result.failed}"
        outputs = {n: {s: (r.output(s), r.finished[s]) for s in sorted(r.tokens)} for n, r in results.items()}
        greedy = outputs["greedy"][0][0]
        scheduler = nodes[0].process.logic.scheduler
        num_steps, before = scheduler.num_steps, scheduler.spec_counters
        stopping = changed(GREEDY, max_tokens=60, min_tokens=30, stop_token_ids=(greedy[38],))
        stopped = client.submit("stopped", prompt_of("greedy"), stopping, decode=nodes[0].info, prefill=prefill)
        client.wait(stopped)
        outputs["stopped"] = {0: (stopped.output(), stopped.finished[0])}
        alone: dict[str, float] = {"steps_alone": scheduler.num_steps - num_steps}
        alone["deltas_alone"] = stopped.num_deltas - len(roles) + 1  # a prefill node sends the first token
        alone |= {f"{name}_alone": count - before[name] for name, count in scheduler.spec_counters.items()}
        assert scheduler.state.num_preemptions or options.get("num_blocks", 256) == 256, "nothing was preempted"
        return outputs, {**nodes[0].process.logic.counters(), **alone}


@cache
def expected() -> Outputs:
    outputs, counters = serve(["unified"], "")
    assert "spec_drafts" not in counters
    return outputs


@pytest.mark.parametrize(
    ("roles", "options"),
    [
        (["unified"], {"num_blocks": 40, "caching": False}),
        pytest.param(["decode", "prefill"], {"chunk": 32}, marks=pytest.mark.slow),  # as below, with another guesser
    ],
    ids=["one", "split"],
)
def test_outputs_are_those_without_guesses(roles: list[str], options: dict[str, object]) -> None:
    """On one node with too few blocks, so that sequences are preempted; and split."""
    outputs, counters = serve(roles, **options)
    assert outputs == expected()
    # Of the one that ran alone: a step a token is what it takes without guesses.
    assert counters["deltas_alone"] <= counters["steps_alone"] <= len(outputs["stopped"][0][0]) / 1.5
    assert 0 < counters["spec_accepted_tokens"] <= counters["spec_draft_tokens"]
    assert counters["spec_drafts"] <= counters["spec_draft_tokens"]


def drafting(folder: Path) -> str:
    return json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4})


def test_a_draft_model_that_is_the_model_is_right_and_changes_no_output() -> None:
    """Split, where it computes the prompt's KV that the prefill node handed over without it."""
    outputs, counters = serve(["decode", "prefill"], drafting(DEMO), chunk=32)
    assert outputs == expected()
    assert counters["spec_accepted_tokens_alone"] >= 0.9 * counters["spec_draft_tokens_alone"] > 20
    assert counters["deltas_alone"] <= counters["steps_alone"] <= len(outputs["stopped"][0][0]) / 3


def test_a_draft_model_beside_several_ranks_is_the_first_ones_alone() -> None:
    """It runs whole on rank 0, of whose guesses the others are told like of any step."""
    child = NodeChild(("unified",), "auto", num_ranks=2, model=str(DEMO), speculative_config=drafting(DEMO))
    node = child.infos[0]
    client = Client(node)
    try:
        asked = {name: ASKED[name] for name in ("greedy", "drawn", "guided", "penalised and drawn")}
        results = {
            name: client.submit(name, prompt_of(name), sampling, decode=node, samples=samples)
            for name, (sampling, samples) in asked.items()
        }
        client.wait()
        client.until(lambda: client.statuses[node.node_id].counters.get("spec_accepted_tokens", 0) > 0)
        counters = client.statuses[node.node_id].counters
    finally:
        client.close()
        child.stop()
    for name, result in results.items():
        assert result.failed is None
        assert {s: (result.output(s), result.finished[s]) for s in sorted(result.tokens)} == expected()[name]
    assert counters["spec_accepted_tokens"] > 0.5 * counters["spec_draft_tokens"]


@pytest.mark.slow
def test_a_draft_model_that_is_wrong_changes_no_output(tmp_path: Path) -> None:
    outputs, counters = serve(["unified"], drafting(random_draft(tmp_path)), num_blocks=40, caching=False)
    assert outputs == expected()
    assert counters["spec_accepted_tokens"] < 0.1 * counters["spec_draft_tokens"]


def heading(folder: Path) -> str:
    return json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4})


@pytest.mark.parametrize(
    ("roles", "options"),
    [
        pytest.param(["unified"], {"num_blocks": 40, "caching": False}, marks=pytest.mark.slow),
        pytest.param(["decode", "prefill"], {"chunk": 32}, marks=pytest.mark.slow),
    ],
    ids=["one", "split"],
)
def test_an_eagle_head_that_is_wrong_changes_no_output(
    roles: list[str], options: dict[str, object], tmp_path: Path
) -> None:
    """On one node with too few blocks; and split, where its keys are handed over beside the model's."""
    outputs, counters = serve(roles, heading(random_head(tmp_path)), **options)
    assert outputs == expected()
    assert counters["spec_accepted_tokens"] < 0.2 * counters["spec_draft_tokens"]
    assert counters["spec_draft_tokens"] > 20


def random_draft(folder: Path, vocab_size: int = 2048) -> Path:
    """A model of one layer and random weights, of the demo model's vocabulary and with half its context."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 1024, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = load_file(DEMO / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name or ".layers.0." in name}
    drawn = {name: torch.randn(weight.shape, generator=generator) * 0.1 for name, weight in kept.items()}
    save_file({name: weight.to(torch.bfloat16) for name, weight in drawn.items()}, folder / "model.safetensors")
    return folder


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2000}))
    with pytest.raises(ConfigError, match="has 2000 tokens, the served model 2048: a draft model must have the same"):
        Node(node_options("unified", DEMO, speculative_config=drafting(tmp_path)))
    own = json.loads((DEMO / "tokenizer.json").read_text())
    shutil.copy(DEMO / "config.json", tmp_path)
    vocabulary = own["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match="are not those of the served model"):
        Node(node_options("unified", DEMO, speculative_config=drafting(tmp_path)))
