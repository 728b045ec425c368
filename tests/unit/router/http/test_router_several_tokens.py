"""Several tokens of a sample in one message, as nodes send them whose guesses are right: one event, the same answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import RouterInThread, make_tokenizer_folder

from stand_in_node import StandInNode
from tandem.router.text.tokenizer import Tokenizer

PROMPT = "the quick brown fox"
TEMPLATE = "<think>{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), chat_template=TEMPLATE) as router:
        yield router.wait_ready()


def events(router: RouterInThread, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with router.client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def added(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the events of each choice add up to, and the last usage."""
    sums: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            total = sums.setdefault(choice["index"], {"text": "", "ids": [], "rows": [], "why": None})
            total["text"] += choice["text"]
            total["ids"] += choice.get("token_ids") or []
            total["rows"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            total["why"] = choice["finish_reason"] or total["why"]
    return [*(sums[index] for index in sorted(sums)), {"usage": chunks[-1].get("usage")}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"n": 2},
        {"logprobs": 2, "return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stop": "to be found"},
        {"stop_token_ids": [-1]},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_answers_are_the_same_in_fewer_events(
    router: RouterInThread, node: StandInNode, folder: Path, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 11, **fields}
    plain = router.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 11, "return_token_ids": True})
    [choice] = plain.json()["choices"]
    if "stop" in fields:
        body["stop"] = Tokenizer(folder).decode(choice["token_ids"][4:6]).strip()
    if "stop_token_ids" in fields:
        body["stop_token_ids"] = choice["token_ids"][4:5]
    wholes, streams = [], []
    for node.tokens_a_step in (1, 3):
        whole = {name: value for name, value in body.items() if name != "stream_options"}
        answer = router.client.post("/v1/completions", json=whole).json()
        wholes.append((answer["choices"], answer["usage"]))
        streams.append(events(router, "/v1/completions", body))
    node.tokens_a_step = 1
    assert wholes[0] == wholes[1]
    assert added(streams[0]) == added(streams[1])
    if "max_tokens" not in fields:
        assert len(streams[1]) < len(streams[0])
    router.wait_idle()


def test_every_token_counts_in_the_metrics_of_gaps(router: RouterInThread, node: StandInNode) -> None:
    def counts() -> list[float]:
        lines = router.client.get("/metrics").text.splitlines()
        names = ("vllm:inter_token_latency_seconds_count", "vllm:generation_tokens_total")
        return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]

    before = counts()
    node.tokens_a_step = 4
    events(router, "/v1/completions", {"prompt": PROMPT, "max_tokens": 9})
    node.tokens_a_step = 1
    gaps, tokens = (after - was for after, was in zip(counts(), before, strict=True))
    assert tokens == 9
    assert gaps == 4 + 1  # what comes with the first token has no gap before it


def test_chat_has_one_event_for_them(router: RouterInThread, node: StandInNode) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    said = []
    for node.tokens_a_step in (1, 3):
        chunks = events(router, "/v1/chat/completions", body)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        said.append(("".join(delta.get("content") or "" for delta in deltas), len(chunks)))
    node.tokens_a_step = 1
    assert said[0][0] == said[1][0]
    assert said[1][1] < said[0][1]
