"""Fields beyond OpenAI's own, and fields that nobody knows: what is taken, what it does, what is left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import BOS, EOS, VOCAB_SIZE, RouterInThread, make_tokenizer_folder

from stand_in_node import StandInNode, stand_in_output
from tandem.engine.contracts.wire.parts import Targets
from tandem.router.text.body_reader import REFUSED, SWITCHES
from tandem.router.text.tokenizer import Tokenizer

PROMPT = "the quick brown fox"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), with_bos=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with RouterInThread(folder, (node.address,), chat_template=template) as router:
        yield router.wait_ready()


def complete(router: RouterInThread, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    asked = CHAT if "chat" in path else {"prompt": PROMPT}
    response = router.client.post(path, json={**asked, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    return response.json()


# README says: "accepted and named in the log once"
def test_what_nobody_knows_is_left_out_and_named_once(router: RouterInThread, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"spaces_between_special_tokens": True, "x": "é", "guided_json": None, "bad_words": [], "suffix": ""}
    options = {"include_usage": True, "y": {"z": [1]}}
    with caplog.at_level(logging.WARNING, logger="tandem.router"):
        plain = complete(router)
        for _ in range(2):
            assert complete(router, **fields)["choices"] == plain["choices"]
            complete(router, "/v1/chat/completions", **fields | {"suffix": None})
            body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "stream_options": options, "x": 1}
            assert '"completion_tokens":2' in router.client.post("/v1/completions", json=body).text
    named = [record.args[0] for record in caplog.records if "unknown and left out" in record.msg]  # type: ignore[index]
    assert sorted(named) == ["spaces_between_special_tokens", "suffix", "x", "y"]


# README says: "`--strict-requests` refuses those"
def test_a_strict_router_refuses_what_nobody_knows(folder: Path, node: StandInNode) -> None:
    with RouterInThread(folder, (node.address,), strict_requests=True) as router:
        router.wait_ready()
        for body, param in (({"x": 1}, "x"), ({"stream": True, "stream_options": {"y": 1}}, "stream_options")):
            answer = router.client.post("/v1/completions", json={"prompt": PROMPT, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        complete(router, guided_json=None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_would_change_the_answer_is_refused(router: RouterInThread, path: str) -> None:
    refused = 0
    for field, why in REFUSED.items():
        answer = router.client.post(path, json={**(CHAT if "chat" in path else {"prompt": PROMPT}), field: {"a": 1}})
        assert answer.status_code == 400, field
        assert answer.json()["error"]["param"] == field
        refused += why in answer.json()["error"]["message"]
        unused = router.client.post(path, json={**(CHAT if "chat" in path else {"prompt": PROMPT}), field: None})
        assert "is not supported" not in unused.text, field
    assert refused > len(REFUSED) - 8, "but those that this path has, and checks by itself"


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_says_something_by_false(router: RouterInThread, field: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    answers = [router.client.post("/v1/completions", json={**body, field: value}) for value in (False, True, None)]
    assert [answer.status_code for answer in answers] == [400, 400, 200]
    assert "leave it out" in answers[0].json()["error"]["message"]
    schema = router.client.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]
    assert schema["properties"][field]["enum"] == [None]


def test_stop_strings_and_stop_tokens_that_are_shown(router: RouterInThread, tokenizer: Tokenizer) -> None:
    ids = stand_in_output(tokenizer.encode(PROMPT), 12, VOCAB_SIZE)
    text = tokenizer.decode(ids)
    stop = text[4:6]
    shown = complete(router, max_tokens=12, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (shown["text"], shown["finish_reason"]) == (text[: text.index(stop) + 2], "stop")
    for is_shown, end in ((True, 6), (False, 5)):
        answer = complete(router, max_tokens=12, stop_token_ids=[ids[5]], include_stop_str_in_output=is_shown)
        assert answer["choices"][0]["text"] == tokenizer.decode(ids[: ids.index(ids[5]) + end - 5])


def test_special_tokens_in_the_output(router: RouterInThread, tokenizer: Tokenizer) -> None:
    """Of the prompts there is one whose output has a special token."""
    prompt = next(p for p in ([i, j] for i in range(9, 99) for j in range(9, 99)) if has_special(p, tokenizer))
    ids = stand_in_output(prompt, 8, VOCAB_SIZE)
    said = complete(router, prompt=prompt, skip_special_tokens=False)["choices"][0]["text"]
    assert said == tokenizer.decode(ids, skip_special_tokens=False)
    assert BOS in said or EOS in said
    assert complete(router, prompt=prompt)["choices"][0]["text"] == tokenizer.decode(ids)
    echoed = complete(router, prompt=[0, *prompt], echo=True, skip_special_tokens=False)["choices"][0]["text"]
    assert echoed.startswith(BOS)


def has_special(prompt: list[int], tokenizer: Tokenizer) -> bool:
    return bool(set(stand_in_output(prompt, 8, VOCAB_SIZE)) & tokenizer.all_special_ids)


def test_prompts_are_cut_at_their_beginning_or_end(
    router: RouterInThread, node: StandInNode, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT * 3)
    answer = complete(router, prompt=PROMPT * 3, truncate_prompt_tokens=5, echo=True, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [ids[0], *ids[-4:]], "the tokenizer's own beginning stays"
    assert answer["choices"][0]["text"].startswith(tokenizer.decode(ids[-4:]))
    assert answer["usage"]["prompt_tokens"] == 5
    for prompt, most, expected in (([7, 8, 9], 2, [8, 9]), ([7, 8], 5, [7, 8]), (list(range(9)) * 99, -1, None)):
        answer = complete(router, prompt=prompt, truncate_prompt_tokens=most, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == (expected or prompt[8 - node.max_model_len :])
    for side, kept in (("right", ids[:5]), ("left", [ids[0], *ids[-4:]])):
        cut = complete(router, prompt=PROMPT * 3, truncate_prompt_tokens=5, truncation_side=side, return_token_ids=True)
        assert cut["choices"][0]["prompt_token_ids"] == kept
    chat = complete(router, "/v1/chat/completions", truncate_prompt_tokens=3)
    assert chat["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_far_beyond_the_model_is_cut_as_well(router: RouterInThread, tokenizer: Tokenizer, side: str) -> None:
    long = " ".join(f"{PROMPT} {number}" for number in range(9999))
    ids = tokenizer.encode(long)
    cut = {"truncate_prompt_tokens": 5, "truncation_side": side, "return_token_ids": True}
    answer = complete(router, prompt=long, **cut)
    expected = ids[:5] if side == "right" else [ids[0], *ids[-4:]]
    assert answer["choices"][0]["prompt_token_ids"] == expected
    said = [{"role": "user", "content": long}]
    chat = complete(router, "/v1/chat/completions", messages=said, **cut)
    assert chat["usage"]["prompt_tokens"] == 5
    refused = router.client.post("/v1/completions", json={"prompt": long, "max_tokens": 1})
    assert "the prompt has more than" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_named_by_their_ids(router: RouterInThread, tokenizer: Tokenizer, path: str) -> None:
    is_chat = "chat" in path
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if is_chat else {"logprobs": 1, "echo": True}
    choice = complete(router, path, max_tokens=2, return_tokens_as_token_ids=True, **fields)["choices"][0]
    prompt = tokenizer.encode(PROMPT, add_special_tokens=not is_chat)
    names = [f"token_id:{i}" for i in ([] if is_chat else prompt) + stand_in_output(prompt, 2, VOCAB_SIZE)]
    logprobs = choice["logprobs"]
    assert ([row["token"] for row in logprobs["content"]] if is_chat else logprobs["tokens"]) == names


def test_names_lengths_and_times(router: RouterInThread, node: StandInNode) -> None:
    assert complete(router, request_id="mine-1")["id"] == "cmpl-mine-1"
    assert complete(router, "/v1/chat/completions", request_id="mine-1")["id"] == "chatcmpl-mine-1"
    assert "mine" not in node.submits[-1].request_id
    assert complete(router, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    promised = {"X-TTFT-Target-Ms": "250", "X-TPOT-Target-Ms": "12.5", "X-ITL-Max-Ms": "40"}
    asked = {"prompt": PROMPT, "tpot_target_ms": 20}
    assert router.client.post("/v1/completions", json=asked, headers=promised).status_code == 200
    assert node.submits[-1].targets == Targets(0.25, 0.02, 0.04), "what the body says comes first"
    node.hold_tokens = True
    try:
        for asked in ({"json": {"prompt": PROMPT, "timeout": 0.2}}, {"headers": {"X-Request-Timeout": "0.2"}}):
            answer = router.client.post("/v1/completions", **{"json": {"prompt": PROMPT}, **asked})  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    finally:
        node.go_on()
    for name in ("X-Request-Timeout", "X-Ttft-Target-Ms", "X-Itl-Max-Ms"):
        for wrong in ("-1", "soon", "nan", "0"):
            answer = router.client.post("/v1/completions", json={"prompt": PROMPT}, headers={name: wrong})
            assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True)
    router.wait_idle()


# README says: "`/tokenizer_info` with `--enable-tokenizer-info-endpoint`"
def test_the_tokenizer_tells_about_itself_where_it_may(folder: Path, node: StandInNode) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with RouterInThread(folder, (node.address,), enable_tokenizer_info_endpoint=True, chat_template=template) as router:
        info = router.client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == (BOS, EOS, template)
    with RouterInThread(folder, (node.address,), enable_tokenizer_info_endpoint=True) as router:
        assert router.client.get("/tokenizer_info").json()["chat_template"] is None


def test_logs_know_a_request_by_its_clients_names(router: RouterInThread, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with caplog.at_level(logging.DEBUG, logger="tandem.router"):
        router.client.post(
            "/v1/completions", json={"prompt": PROMPT}, headers={"traceparent": trace, "X-Request-Id": "mine"}
        )
        router.client.post("/v1/completions", json={"prompt": PROMPT}, headers={"traceparent": "00-junk"})
    said = [record.getMessage() for record in caplog.records if "request id" in record.getMessage()]
    assert said[0].endswith("request id mine, trace 4bf92f3577b34da6a3ce929d0e0e4736")
    assert "trace" not in said[1]


STREAMED = {"model": "stand-in", "stream": True, "stream_options": {"include_usage": True}}
AS_PARTS = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
# As the clients send them, by default and with their options that add a field.
LOAD_TESTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("vllm bench serve", "/v1/completions", STREAMED | {
        "prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "ignore_eos": True,
    }),
    ("vllm bench serve, chat", "/v1/chat/completions", STREAMED | {
        "messages": AS_PARTS, "max_completion_tokens": 4, "ignore_eos": True, "temperature": 0.0, "top_k": 5,
    }),
    ("sglang.bench_serving", "/v1/completions", STREAMED | {
        "prompt": PROMPT, "temperature": 0.0, "best_of": 1, "max_tokens": 4, "ignore_eos": True,
    }),
    ("sglang.bench_serving, chat", "/v1/chat/completions", STREAMED | {
        "messages": [{"role": "user", "content": PROMPT}], "temperature": 0.0, "max_completion_tokens": 4,
        "ignore_eos": True,
    }),
    ("guidellm", "/v1/completions", STREAMED | {
        "prompt": PROMPT, "max_tokens": 4, "stop": None, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }),
    ("guidellm, chat", "/v1/chat/completions", STREAMED | {
        "messages": AS_PARTS, "max_completion_tokens": 4, "stop": None, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }),
    ("aiperf", "/v1/chat/completions", STREAMED | {
        "messages": [{"role": "user", "content": PROMPT, "name": "a"}], "max_completion_tokens": 4, "min_tokens": 4,
        "ignore_eos": True,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in LOAD_TESTERS], ids=[case[0] for case in LOAD_TESTERS])
def test_what_load_testers_send(
    router: RouterInThread, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    answer = router.client.post(path, json=body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    texts = [event["choices"][0] for event in events[:-1]]
    assert sum(bool(choice.get("text") or choice.get("delta", {}).get("content")) for choice in texts) >= 1
    assert answer.text.endswith("data: [DONE]\n\n")
    assert not caplog.records, "nothing of it is unknown"
