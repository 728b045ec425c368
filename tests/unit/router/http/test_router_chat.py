"""Chat over HTTP, in front of a stand-in node: what is refused and how, and what stands around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread, make_tokenizer_folder

from stand_in_node import StandInNode, stand_in_output
from tandem.router.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ODD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools or '' }}assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), with_bos=True)


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), chat_template=TEMPLATE, tool_call_parser="hermes") as router:
        yield router.wait_ready()


@pytest.fixture(scope="module")
def bare(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    """The model has no template."""
    with RouterInThread(folder, (node.address,)) as router:
        yield router.wait_ready()


@pytest.fixture(autouse=True)
def _nothing_is_left(router: RouterInThread) -> Iterator[None]:
    yield
    router.wait_idle()


def ask(router: RouterInThread, path: str = "/v1/chat/completions", **body: Any) -> Any:
    return router.client.post(path, json={"messages": MESSAGES, **body})


def test_the_template_writes_the_prompt_and_nothing_else_does(
    router: RouterInThread, node: StandInNode, folder: Path
) -> None:
    answer = ask(router, max_tokens=5).json()
    ids = Tokenizer(folder).encode("user: the quick brown fox\nassistant:", add_special_tokens=False)
    assert node.submits[-1].prompt_token_ids == b"".join(i.to_bytes(4, "little") for i in ids)
    text = Tokenizer(folder).decode(stand_in_output(ids, 5, VOCAB_SIZE))
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert ask(router, "/tokenize").json()["tokens"] == ids
    assert ask(router, "/tokenize", add_special_tokens=True).json()["count"] == len(ids) + 1
    ask(router)  # as long as there is room for
    assert node.submits[-1].sampling.max_tokens == node.max_model_len - len(ids)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", r"messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages", "tokens"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_completion_tokens": 513}, "max_tokens", "together they may not exceed"),
    ({"audio": {}}, "audio", "text alone"),
    ({"modalities": ["text", "audio"]}, "modalities", "text alone"),
    ({"web_search_options": {}}, "web_search_options", "searches nothing"),
    ({"functions": [{}]}, "functions", "`tools`"),
    ({"function_call": "auto"}, "function_call", "`tool_choice`"),
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format", '"not"'),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "unclosed group"),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "nothing"),
    ({"chat_template": "x"}, "chat_template", "operator"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "place of its own"),
    ({"tool_choice": "auto"}, "tool_choice", "when there are tools"),
    ({"tools": [{"type": "web_search"}]}, "tools", "functions alone"),
    ({"tools": [ODD_TOOL], "tool_choice": "required"}, "tools", "uniqueItems"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice", "must be none, auto"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "enum"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ({"echo": True}, "echo", "repeat the conversation"),
    ({"prompt": "x"}, "prompt", "/v1/completions"),
    ({"parralel_tool_calls": True}, "parralel_tool_calls", "parallel_tool_calls"),
    ({"verbosity": "low"}, "verbosity", "enum"),
    ({"model": "gpt"}, "model", "does not exist"),
]


@pytest.mark.parametrize(
    ("fields", "param", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_refused_names_the_field(router: RouterInThread, fields: dict[str, Any], param: str, says: str) -> None:
    answer = ask(router, **fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"]


def test_what_changes_nothing_is_accepted(router: RouterInThread) -> None:
    fields = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me", "safety_identifier": "x",
        "prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}, "modalities": ["text"],
        "response_format": {"type": "text"}, "verbosity": "medium", "reasoning_effort": "low", "tools": [],
        "logprobs": False, "top_logprobs": 0, "tool_choice": "none", "audio": None, "stream_options": None,
        "parallel_tool_calls": True,
    }  # fmt: skip
    assert ask(router, max_tokens=2, **fields).status_code == 200


def test_a_model_without_a_template_or_a_parser_says_what_to_do(
    bare: RouterInThread, node: StandInNode, folder: Path
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = ask(bare, path)
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]
    assert bare.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    error = ask(bare, tools=[TOOL]).json()["error"]
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    with RouterInThread(folder, (node.address,), chat_template="{{ 'hello' }}", tool_call_parser="hermes") as other:
        error = ask(other.wait_ready(), tools=[TOOL]).json()["error"]
        assert error["param"] == "tools"
        assert "no place for tools" in error["message"]


def test_request_ids_come_back(router: RouterInThread) -> None:
    for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
        for given in ("abc-1", ""):
            headers = {"X-Request-Id": given} if given else {}
            answer = router.client.post(path, json={"messages": MESSAGES, "max_tokens": 1}, headers=headers)
            [request_id] = answer.headers.get_list("x-request-id")
            assert request_id == given or (not given and len(request_id) == 32)
    for bad in (b"a b", b"\xff", b"x" * 257):
        answer = router.client.get("/ping", headers={b"x-request-id": bad})
        assert (answer.status_code, len(answer.headers["x-request-id"])) == (200, 32)
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    answer = router.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "s"})
    assert answer.headers["x-request-id"] == "s"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_what_clients_read_of_a_model(router: RouterInThread) -> None:
    [card] = router.client.get("/v1/models").json()["data"]
    assert card == router.client.get("/v1/models/stand-in").json()
    assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == ("stand-in", "stand-in", None, 512)
    assert router.client.post("/ping").status_code == 200
