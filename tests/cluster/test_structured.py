"""Output under grammars: the same on one node and split, for every way in which a sequence may come to its node."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

import tandem.deploy
from in_process_cluster import Client, Node, Result, client_of, node_options
from tandem.engine.contracts.sampling_params import SamplingParams

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 80},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 12, "maxItems": 16},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(RECORD, overrides={"whitespace_flexible": False})
GREEDY = SamplingParams(max_tokens=150, temperature=0.0, grammar=GRAMMAR)
DRAWN = SamplingParams(max_tokens=150, temperature=1.0, seed=3, grammar=GRAMMAR, num_logprobs=1, frequency_penalty=0.5)
FREE = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
WORD = SamplingParams(max_tokens=20, temperature=1.0, seed=9, grammar='start: "yes" | "no"', ignore_eos=True)
HELD = SamplingParams(max_tokens=40, temperature=1.0, seed=4, allowed_token_ids=tuple(range(40, 90)), ignore_eos=True)
CUT = SamplingParams(max_tokens=30, temperature=0.0, grammar=GRAMMAR)


BANNED = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, bad_words=((962, 27, 352),))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def check_record(token_ids: list[int]) -> None:
    record = json.loads(tokenizer().decode(token_ids))
    assert list(record) == ["name", "count", "tags"]
    assert 60 <= len(record["name"]) <= 80
    assert 0 <= record["count"] <= 99
    assert set(record["tags"]) <= {"red", "green"}
    assert 12 <= len(record["tags"]) <= 16


Outputs = dict[str, dict[int, tuple[list[int], str]]]


def ask_all(client: Client, nodes: list[Node], runs_at_once: bool) -> Outputs:
    prefill = nodes[1].info if len(nodes) > 1 else None

    def submit(name: str, sampling: SamplingParams, samples: tuple[int, ...] = (0,), about: str = "") -> Result:
        prompt = ids_of(f"{about or name}: def read_lines(path, encoding):" * 8)
        return client.submit(name, prompt, sampling, decode=nodes[0].info, prefill=prefill, samples=samples)

    with nodes[0].holding_until_accepted(client) if runs_at_once else nullcontext():
        results = {
            "greedy": submit("greedy", GREEDY),
            "drawn": submit("drawn", DRAWN, (0, 1, 2)),
            "free": submit("free", FREE),
            "word": submit("word", WORD, (0, 1)),
            "cut": submit("cut", CUT),
            "held": submit("held", HELD, (0, 1)),
            "banned": submit("banned", BANNED, about="free"),
        }
    client.wait()
    for name, result in results.items():
        assert result.failed is None, f"{name}: {result.failed}"
    return {n: {s: (r.output(s), r.finished[s]) for s in sorted(r.tokens)} for n, r in results.items()}


@cache
def single() -> Outputs:
    return serve(["unified"])


def serve(roles: list[str], **options: object) -> Outputs:
    nodes = [Node(node_options(role, DEMO, **options)) for role in roles]
    with client_of(nodes) as client:
        outputs = ask_all(client, nodes, runs_at_once="num_blocks" in options)
        if len(nodes) > 1:
            assert nodes[0].process.logic.handoffs.sink.counters.commits >= 5, "nothing was handed over"
        if options.get("num_blocks"):
            assert nodes[0].process.logic.scheduler.state.num_preemptions, "nothing was preempted"
        return outputs


def test_output_follows_its_grammar_and_ends_with_it() -> None:
    outputs = single()
    for name in ("greedy", "drawn"):
        for token_ids, reason in outputs[name].values():
            check_record(token_ids)
            assert reason == "stop"
    assert len({tuple(token_ids) for token_ids, _ in outputs["drawn"].values()}) == 3
    for token_ids, reason in outputs["word"].values():
        assert (tokenizer().decode(token_ids) in ("yes", "no"), reason) == (True, "stop")
    assert outputs["free"][0][1] == outputs["cut"][0][1] == "length"
    assert all(set(ids) <= set(HELD.allowed_token_ids) and len(set(ids)) > 1 for ids, _ in outputs["held"].values())
    free, banned = outputs["free"][0][0], outputs["banned"][0][0]
    at = next(i for i in range(len(free)) if tuple(free[i : i + 3]) == BANNED.bad_words[0])
    assert banned[: at + 2] == free[: at + 2]
    assert banned[at + 2] != free[at + 2]
    assert not any(tuple(banned[i : i + 3]) == BANNED.bad_words[0] for i in range(len(banned)))
    assert outputs["cut"][0][0] == outputs["greedy"][0][0][:30] or outputs["cut"][0][0][:1] == ids_of("{")[-1:]


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"chunk": 16}], ids=["whole", "chunks"])
def test_split_makes_what_one_node_makes(options: dict[str, object]) -> None:
    assert serve(["decode", "prefill"], **options) == single()


@pytest.mark.slow  # with guesses beside it, test_speculation.py asks this of make test
def test_recomputed_sequences_go_on_in_their_grammar() -> None:
    assert serve(["unified"], num_blocks=36, caching=False) == single()


def test_the_next_attempt_goes_on_behind_what_the_client_has() -> None:
    node = Node(node_options("unified", DEMO))
    client = Client(node.info)
    try:
        whole, reason = single()["greedy"][0]
        prompt = ids_of("greedy: def read_lines(path, encoding):" * 8)
        for seen in (1, 7, len(whole) - 1):
            result = client.submit(
                f"again-{seen}", prompt + whole[:seen], GREEDY, decode=node.info, attempt=1, num_prior=seen
            )
            client.wait()
            assert (whole[:seen] + result.output(), result.finished[0]) == (whole, reason)
    finally:
        client.close()
        node.stop()


def test_a_grammar_that_cannot_be_followed_costs_its_request_alone() -> None:
    node = Node(node_options("unified", DEMO))
    client = Client(node.info)
    try:
        prompt = ids_of("def read_lines(path):")
        bad = [
            client.submit(f"bad-{i}", prompt, SamplingParams(grammar=grammar), decode=node.info)
            for i, grammar in enumerate(("start: nothing", "start: a\na: a", "x" * (1 << 19)))
        ]
        good = client.submit("good", prompt, WORD, decode=node.info)
        client.wait()
        assert [result.failed and (result.failed.code, result.failed.retryable) for result in bad] == [
            ("invalid_request", False)
        ] * 3
        assert good.finished == {0: "stop"}
        node.wait_until_whole()
    finally:
        client.close()
        node.stop()
