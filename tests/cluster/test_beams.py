"""Beam search: the hypotheses and scores of transformers' generate(num_beams=…), on one node and split over two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_adapters import merged, tiny_adapter
from tokenizers import Tokenizer

import tandem.deploy
from in_process_cluster import Client, Node, Result, client_of, node_options
from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tiny_models import random_prompt, reference_model, tiny_model

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LLAMA_STOPS = tuple(range(1, 500, 9))  # so many that most steps end some beam


def searched(width: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "beam_width": width, **changes})  # type: ignore[arg-type]


# name -> (prompt's length, settings)
SEARCHES = {
    "one": (5, searched(1)),
    "plain": (17, searched(4)),
    "long": (90, searched(5, ignore_eos=True, max_tokens=40)),
    "at a block's end": (32, searched(3, max_tokens=17)),
    "one token": (33, searched(4, max_tokens=1)),
    "ending": (17, searched(4, stop_token_ids=LLAMA_STOPS, max_tokens=30)),
    "ending early": (18, searched(4, stop_token_ids=LLAMA_STOPS, early_stopping=True)),
    "short ones": (19, searched(4, stop_token_ids=LLAMA_STOPS, length_penalty=-1.0)),
    "long ones": (20, searched(4, stop_token_ids=LLAMA_STOPS, length_penalty=2.0, early_stopping="never")),
    "unpenalised": (21, searched(3, stop_token_ids=LLAMA_STOPS, length_penalty=0.0, early_stopping="never")),
    "not at once": (22, searched(3, stop_token_ids=LLAMA_STOPS, min_tokens=6)),
}
Found = dict[str, list[tuple[list[int], float]]]  # by search, best first: tokens, and the sum of their logprobs


@cache
def reference(folder: Path, names: tuple[str, ...] = tuple(SEARCHES)) -> Found:
    """What transformers finds, its scores turned back into sums."""
    found: Found = {}
    for name in names:
        length, params = SEARCHES[name]
        prompt = torch.tensor([random_prompt(length, seed=length)])
        eos = [1, *params.stop_token_ids[1:]] if params.stop_token_ids else 1
        with torch.inference_mode():
            out = reference_model(folder).generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                do_sample=False,
                max_new_tokens=params.max_tokens,
                min_new_tokens=params.min_tokens or None,
                eos_token_id=None if params.ignore_eos else eos,
                pad_token_id=0,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                return_dict_in_generate=True,
                output_scores=True,
            )
        if params.beam_width == 1:
            tokens = out.sequences[0, length:].tolist()
            scores = torch.stack(out.scores)[:, 0].log_softmax(-1)
            found[name] = [(tokens, float(scores.gather(1, torch.tensor(tokens)[:, None]).sum()))]
            continue
        ends = set() if params.ignore_eos else {eos} if isinstance(eos, int) else set(eos)
        found[name] = []
        for row, score in zip(out.sequences[:, length:].tolist(), out.sequences_scores.tolist(), strict=True):
            tokens = row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]
            while tokens[-1] == 0:  # padding, which no prompt of these ends with
                tokens.pop()
            found[name].append((tokens, score * len(tokens) ** params.length_penalty))
    return found


def check(name: str, result: Result, expected: list[tuple[list[int], float]]) -> None:
    assert result.failed is None, f"{name}: {result.failed}"
    params = SEARCHES[name][1]
    for sample, (tokens, total) in enumerate(expected):
        assert result.output(sample) == tokens, f"{name}: hypothesis {sample}"
        assert result.cumulative_logprobs[sample] == pytest.approx(total, abs=2e-3), f"{name}: hypothesis {sample}"
        ended = not params.ignore_eos and tokens[-1] in (1, *params.stop_token_ids)
        assert result.finished[sample] == ("stop" if ended else "length")


@contextmanager
def running(*roles: str, model: Path, **options: object) -> Iterator[tuple[Client, list[Node]]]:
    """Nodes, whose blocks must all be free in the end, and a client of them."""
    nodes = [Node(node_options(role, model, **options)) for role in roles]
    with client_of(nodes) as client:
        yield client, nodes


def ask(
    client: Client,
    nodes: list[Node],
    priority: int = 0,
    names: tuple[str, ...] = tuple(SEARCHES),
    adapter: AdapterRef | None = None,
) -> dict[str, Result]:
    return {
        name: client.submit(
            name,
            random_prompt(length, seed=length),
            params,
            decode=nodes[0].info,
            prefill=nodes[1].info if len(nodes) > 1 else None,
            samples=tuple(range(params.beam_width)),
            priority=priority,
            adapter=adapter,
        )
        for name, (length, params) in SEARCHES.items()
        if name in names
    }


def test_beams_take_an_adapter(tmp_path: Path) -> None:
    """Split: what is handed over, forked and gone on with is the adapter's."""
    base, names = tiny_model("llama"), ("plain", "ending")
    adapter = tiny_adapter(tmp_path / "adapter", base, seed=5)
    expected = reference(merged(tmp_path / "merged", base, adapter), names)
    ref = AdapterRef(str(adapter), read_adapter(str(adapter)).digest)
    with running("decode", "prefill", model=base, lora=LoraOptions(True)) as (client, nodes):
        results = ask(client, nodes, names=names, adapter=ref)
        client.wait()
        for name, result in results.items():
            check(name, result, expected[name])


# README says: "the outputs and scores of transformers' beams"
@pytest.mark.parametrize(
    ("roles", "options"),
    [
        (("unified",), {}),
        pytest.param(("decode", "prefill"), {}, marks=pytest.mark.slow),
        (("decode", "prefill"), {"num_blocks": 25, "chunk": 16}),
    ],
    ids=["one node", "split", "split, in small pools"],
)
def test_beams_are_those_of_transformers(roles: tuple[str, ...], options: dict[str, object]) -> None:
    folder = tiny_model("llama")
    with running(*roles, model=folder, **options) as (client, nodes):
        logic = nodes[0].process.logic
        if options:
            nodes[0].hold_after(0)
        results = ask(client, nodes)
        if options:  # those that it has are more than it has room for in the end
            client.until(lambda: logic.handoffs.sink.counters.commits >= 6)
            nodes[0].go_on()
        client.wait()
        for name, result in results.items():
            check(name, result, reference(folder)[name])
        if len(nodes) > 1:
            assert logic.handoffs.sink.counters.commits == len(SEARCHES), "one hand-off each"
        assert bool(logic.scheduler.state.num_preemptions) == bool(options)


@pytest.mark.parametrize("caching", [pytest.param(True, marks=pytest.mark.slow), False])
def test_beams_that_were_preempted_go_on_as_if_nothing_had_been(caching: bool) -> None:
    folder = tiny_model("llama")
    with running("unified", model=folder, num_blocks=40, caching=caching) as (client, nodes):
        nodes[0].hold_after(8)
        results = ask(client, nodes, priority=1)
        client.until(lambda: all(result.accepted for result in results.values()))
        urgent = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        large = client.submit("large", random_prompt(500, seed=1), urgent, decode=nodes[0].info)
        client.until(lambda: bool(large.accepted))
        nodes[0].go_on()
        client.wait()
        assert nodes[0].process.logic.scheduler.state.num_preemptions, "nothing was preempted"
        for name, result in results.items():
            check(name, result, reference(folder)[name])


def test_a_search_ends_wherever_it_is() -> None:
    with running("decode", "prefill", model=tiny_model("llama")) as (client, nodes):
        nodes[0].hold_after(5)
        endless = searched(4, max_tokens=500, ignore_eos=True)
        samples = (0, 1)
        split = client.submit(
            "split", random_prompt(50, 1), endless, decode=nodes[0].info, prefill=nodes[1].info, samples=samples
        )
        late = client.submit("late", random_prompt(51, 1), endless, decode=nodes[0].info, deadline_s=0.5)
        client.until(lambda: bool(split.accepted and late.accepted))
        client.wait(late)
        assert late.failed is not None
        assert late.failed.code == "deadline_exceeded"
        client.cancel("split", 0, *(node.info for node in nodes))
        client.until(lambda: split.cancelled)
        nodes[0].go_on()
        assert not split.tokens
        large = client.submit("large", random_prompt(51, 1), searched(64, max_tokens=1900), decode=nodes[0].info)
        client.wait(large)
        assert large.failed is not None
        assert large.failed.code == "too_large_for_pool"
        assert "beam_width" in large.failed.message


GRAMMARS = {
    "a or b": 'start: "a" | "b"',
    "a list": 'start: "[" /[0-9]{2}/ (", " /[0-9]{2}/){3} "]"',
    "free end": "start: /[a-z ]+/",
}


def test_each_beam_follows_the_grammar() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = []
    for roles in (("unified",), ("decode", "prefill")):
        with running(*roles, model=DEMO) as (client, nodes):
            results = {
                name: client.submit(
                    name,
                    tokenizer.encode(f"def {name}(path):").ids,
                    searched(4, max_tokens=16, grammar=grammar, num_logprobs=1),
                    decode=nodes[0].info,
                    prefill=nodes[1].info if len(nodes) > 1 else None,
                    samples=(0, 1, 2),
                )
                for name, grammar in GRAMMARS.items()
            }
            client.wait()
            assert not any(result.failed for result in results.values()), results
            outputs = {n: [r.output(s) if s in r.tokens else [] for s in range(3)] for n, r in results.items()}
            sums = {n: r.cumulative_logprobs for n, r in results.items()}
            for name, result in results.items():
                for sample, total in sums[name].items():
                    own = sum(entry.logprobs[0] for entry in result.logprobs[sample])
                    assert own == pytest.approx(total, abs=1e-3)
        found.append((outputs, sums))
    assert found[0][0] == found[1][0]
    outputs, sums = found[0]
    assert sorted(map(tokenizer.decode, outputs["a or b"])) == ["", "a", "b"]
    assert set(sums["a or b"]) == {0, 1}
    lists = [tokenizer.decode(tokens) for tokens in outputs["a list"]]
    assert all(re.fullmatch(r"\[\d\d(, \d\d){3}\]", text) for text in lists), lists
    assert len(set(lists)) == 3
    assert all(re.fullmatch("[a-z ]+", tokenizer.decode(tokens)) for tokens in outputs["free end"])
