"""Bad input gets a 4xx in OpenAI's shape that names the field, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_in_thread import VOCAB_SIZE, RouterInThread, make_tokenizer_folder
from waiting import PATIENCE_S

from stand_in_node import StandInNode

MAX_BODY = 200_000


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), max_body_bytes=MAX_BODY) as router:
        yield router.wait_ready()


@pytest.fixture(autouse=True)
def _nothing_is_left(router: RouterInThread, node: StandInNode) -> Iterator[None]:
    yield
    router.wait_idle()
    assert not node.running


def fault(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BAD_FIELDS: list[tuple[str, Any]] = [
    ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", None), ("prompt", 7), ("prompt", {}),
    ("prompt", [1, "a"]), ("prompt", ["a", 1]), ("prompt", [1.5]), ("prompt", [True]), ("prompt", ["a", ""]),
    ("prompt", [-1]), ("prompt", [VOCAB_SIZE]), ("prompt", [1 << 31]), ("prompt", [1 << 80]), ("prompt", [[1], [[2]]]),
    ("prompt", [5] * 512), ("prompt", "x" * 5000), ("prompt", ["a"] * 2049),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 513), ("max_tokens", 1.5), ("max_tokens", "8"),
    ("max_tokens", True), ("max_tokens", 1 << 70), ("max_tokens", [1]),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("n", 0), ("n", -1), ("n", 129), ("n", 1.0), ("n", "2"),
    ("best_of", 0), ("best_of", 129), ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", [1]), ("stop", 1), ("stop", {}),
    ("seed", "x"), ("seed", 1.5), ("seed", 1 << 64), ("suffix", "end"), ("suffix", 1), ("stream", "yes"),
    ("stream", 1),
    ("ttft_target_ms", 0), ("tpot_target_ms", -1), ("itl_max_ms", 1e9), ("itl_max_ms", "5"),
    ("stream_options", {}), ("stream_options", []), ("echo", "yes"), ("user", 5), ("priority", 1 << 40),
    ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("min_p", -0.1), ("top_k", -2),
    ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"400": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "x"}), ("logit_bias", []), ("logit_bias", {"²": 1}), ("stop_token_ids", [400]),
    ("stop_token_ids", ["a"]), ("stop_token_ids", 1), ("min_tokens", 17), ("min_tokens", -1), ("ignore_eos", 1),
    ("logit_bias", {str(i): 1 for i in range(4097)}), ("logit_bias", {"1": True}), ("logit_bias", {" 1": 1}),
    ("stop_token_ids", [0] * 65), ("stop", "z" * 1025), ("stop", ["z" * 1025]), ("stop", ["a", None]),
    ("model", 7), ("use_prefix_cache", 0), ("best_of", True), ("priority", "high"), ("priority", 1.5),
    ("prompt", ["a", [1]]), ("prompt", [[1], "a"]), ("prompt", [[1], 2]), ("prompt", [None]), ("prompt", [1] * 50_000),
    ("return_token_ids", "x"), ("prompt_logprobs", 21),
    ("messages", [{}]), ("max_new_tokens", 5),
    ("temprature", 1), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("timeout", 0),
    ("request_id", "a b"), ("allowed_token_ids", [5000]), ("allowed_token_ids", []), ("bad_words", [""]),
    ("request_id", ""), ("use_beam_search", 1), ("beam_width", 4), ("num_beams", 4),
    ("guided_json", {"not": {}}), ("response_format", {"type": "xml"}),
    ("structured_outputs", {"regex": "("}),
    ("extra_body", {"top_k": 1}), ("max_completion_tokens", -1), ("skip_special_tokens", 0),
]  # fmt: skip


# README says: "Errors have OpenAI's shape and name the field"
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:24])
def test_the_error_names_the_field(router: RouterInThread, field: str, value: Any) -> None:
    response = router.client.post("/v1/completions", json={"prompt": "the fox", field: value})
    assert fault(response)["param"] == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options"),
        ({"max_tokens": 4, "max_completion_tokens": 513}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
        ({"prompt": ["a"] * 100, "n": 50}, "n"),
    ],
)
def test_combinations(router: RouterInThread, body: dict[str, Any], param: str) -> None:
    assert fault(router.client.post("/v1/completions", json={"prompt": "the fox", **body}))["param"] == param


def test_a_missing_prompt_and_a_wrong_model(router: RouterInThread) -> None:
    assert fault(router.client.post("/v1/completions", json={"max_tokens": 1}))["param"] == "prompt"
    error = fault(router.client.post("/v1/completions", json={"prompt": "a", "model": "gpt"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


RAW = [
    b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff\xfe\x00", b'{"prompt": "\xff"}', b'{"prompt": "a", "user": "\xc3"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a"',
    b'{"prompt": "a", "n": 01}', b'\xef\xbb\xbf{"prompt": "a"}', '{"prompt": "a"}'.encode("utf-16"),
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": "a"} x', b"{'prompt': 'a'}",
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"suffix":' + b'{"a":' * 20_000, b"\x00" * 100,
]  # fmt: skip


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: repr(raw)[:24])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(router: RouterInThread, path: str, raw: bytes) -> None:
    fault(router.client.post(path, content=raw))


@pytest.mark.parametrize("field", ["max_tokens", "prompt"])
def test_every_value_of_a_repeated_field_is_checked(router: RouterInThread, field: str) -> None:
    for raw in (b'{"prompt": "a", "max_tokens": 1, "%s": {}}', b'{"%s": {}, "prompt": "a", "max_tokens": 1}'):
        response = router.client.post("/v1/completions", content=raw % field.encode())
        if response.status_code != 200:  # of a prompt the last one counts
            assert fault(response)["param"] == field
        else:
            assert (field, raw[:2]) == ("prompt", b'{"')


# README says: "at most 8 MiB (413)"
def test_a_large_body_gets_its_answer_however_it_is_sent(router: RouterInThread) -> None:
    for path in ("/v1/completions", "/tokenize"):
        fault(router.client.post(path, json={"prompt": "x" * 10_000_000}), 413)
    fault(router.client.post("/v1/completions", content=(b" " * 10_000 for _ in range(1000))), 413)
    # A client that sends everything before it reads must not be cut off.
    body = b" " * 10_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    assert exchange(router, head + b"\r\n" + body, end=False).startswith(b"HTTP/1.1 413 ")
    # One that asks first is told at once.
    assert exchange(router, head + b"Expect: 100-continue\r\n\r\n", end=False).startswith(b"HTTP/1.1 413 ")


# README says: "Bodies are JSON (415"
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_do_not_say_json(router: RouterInThread, path: str, headers: dict[str, str]) -> None:
    fault(router.client.post(path, content=b'{"prompt": "a"}', headers=headers), 415)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_wrong_methods_and_paths(router: RouterInThread, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert fault(router.client.request(method, path), 405)["code"] == "method_not_allowed"
    assert fault(router.client.post(path + "/more", json={}), 404)["code"] == "not_found"


def exchange(router: RouterInThread, data: bytes, end: bool = True) -> bytes:
    """Sends raw bytes, ends the client's side, returns all that comes back."""
    with socket.create_connection(("127.0.0.1", int(router.url.rsplit(":", 1)[1])), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": "a"',
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{"prompt": ',
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n",
    ],
    ids=["body", "chunk", "header", "garbage", "length"],
)
def test_half_a_request(router: RouterInThread, data: bytes) -> None:
    head, _, body = exchange(router, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_long_text_holds_nobody_up(tmp_path: Path, path: str) -> None:
    """The event loop goes on while a text is tokenized."""
    folder, node = make_tokenizer_folder(tmp_path / "tokenizer"), StandInNode(max_model_len=50_000).start()
    body = {"prompt": "the quick brown fox " * 60_000}
    with RouterInThread(folder, (node.address,)) as router, ThreadPoolExecutor(1) as pool:
        router.wait_ready()
        num_answers = 0
        answer = pool.submit(router.client.post, path, json=body)
        while not answer.done():
            assert router.client.get("/health").status_code == 200
            num_answers += 1
        assert answer.result().status_code == (200 if path == "/tokenize" else 400)
        assert num_answers > 5, "others were answered before it was begun, perhaps, and when it was done"
    node.stop()


def test_the_rest_of_a_text_that_is_far_too_long_is_not_tokenized(router: RouterInThread) -> None:
    error = fault(router.client.post("/v1/completions", json={"prompt": "the fox " * 20_000}))
    assert error["param"] == "prompt"
    assert "more than 1024 tokens" in error["message"]
    error = fault(router.client.post("/tokenize", json={"prompt": "the fox " * 20_000}))
    assert error["param"] == "prompt"
    assert "at most 16384" in error["message"]


# --- a thousand random bodies -----------------------------------------------------------------------------------

VALID: list[dict[str, Any]] = [
    {"prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0.5, "stop": ["a", "b"], "model": "stand-in"},
    {"prompt": [1, 2, 3], "n": 2, "logprobs": 2, "echo": True, "seed": 3, "max_tokens": 2},
    {"prompt": ["a", "b"], "best_of": 3, "n": 2, "logit_bias": {"5": 2.0}, "max_tokens": 3},
    {"prompt": [[1], [2, 3]], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3},
    {"prompt": "x", "top_k": 4, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1, "return_token_ids": True},
    {"prompt": "x", "prompt_logprobs": 1, "priority": 5, "stop_token_ids": [3], "max_tokens": 0, "echo": True},
]
FIELDS = sorted({name for body in VALID for name in body} | {"suffix", "user", "top_p", "presence_penalty", "bogus"})
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.integers(-3, 30), st.floats(), st.text(max_size=8),
    st.sampled_from(["", "\ud800", "a", "\x00", 1e308, -0.0, 400, 1 << 31]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@st.composite
def random_bodies(draw: st.DrawFn) -> bytes:
    body = dict(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 3))):
        body[draw(st.sampled_from(FIELDS))] = draw(values)
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        body.pop(name, None)
    raw = json.dumps(body).encode()
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):  # damage the bytes as well
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :] or b"{"
    return raw


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=random_bodies())
def test_random_bodies_never_give_a_5xx(router: RouterInThread, node: StandInNode, raw: bytes) -> None:
    response = router.client.post("/v1/completions", content=raw)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        fault(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"]
