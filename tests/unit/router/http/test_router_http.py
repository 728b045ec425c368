"""The API over real HTTP, in front of stand-in nodes: what OpenAI's clients send and expect."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread

import tandem
from stand_in_node import StandInNode, stand_in_output
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.wire.parts import Targets
from tandem.engine.process.version import version
from tandem.router.text.tokenizer import Tokenizer

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,)) as router:
        yield router.wait_ready()


@pytest.fixture(autouse=True)
def _nothing_is_left(router: RouterInThread, node: StandInNode) -> Iterator[None]:
    yield
    router.wait_idle()
    assert not node.running


def complete(router: RouterInThread, **body: Any) -> dict[str, Any]:
    response = router.client.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(router: RouterInThread, **body: Any) -> list[dict[str, Any]]:
    with router.client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def expected(tokenizer: Tokenizer, num_tokens: int, prompt: str = PROMPT, sample: int = 0) -> list[int]:
    return stand_in_output(tokenizer.encode(prompt), num_tokens, VOCAB_SIZE, sample)


# --- whole responses ------------------------------------------------------------------------------------------


def test_a_model_of_several_names(folder: Path, node: StandInNode) -> None:
    model = ModelOptions(str(folder), served_name="one, two")
    with RouterInThread(folder, (node.address,), model=model) as router:
        router.wait_ready()
        cards = router.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("one", "one"), ("two", "one")]
        assert [complete(router, max_tokens=1, model=name)["model"] for name in ("one", "two")] == ["one", "two"]
        assert router.client.post("/v1/completions", json={"prompt": "a", "model": "one, two"}).status_code == 404


def test_a_completion(router: RouterInThread, tokenizer: Tokenizer) -> None:
    answer = complete(router, max_tokens=6, model="stand-in")
    ids = expected(tokenizer, 6)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "stand-in"
    assert answer["choices"] == [
        {"index": 0, "text": tokenizer.decode(ids), "logprobs": None, "finish_reason": "length"}
    ]
    num_prompt = len(tokenizer.encode(PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6,
        "total_tokens": num_prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_every_kind_of_prompt(router: RouterInThread, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    text = tokenizer.decode(expected(tokenizer, 4))
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        assert complete(router, prompt=prompt, max_tokens=4)["choices"][0]["text"] == text
    two = complete(router, prompt=[PROMPT, "lazy dog"], n=2, max_tokens=4)
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in two["choices"]] == [
        tokenizer.decode(expected(tokenizer, 4, prompt, sample)) for prompt in (PROMPT, "lazy dog") for sample in (0, 1)
    ]


def test_what_a_node_is_told(router: RouterInThread, node: StandInNode, tokenizer: Tokenizer) -> None:
    complete(
        router, prompt=PROMPT * 5, max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=-1, priority=-2,
        repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=1, logit_bias={"7": -100, "3": 1.5},
        stop_token_ids=[399], ignore_eos=True, min_tokens=2, n=2, user="somebody", ttft_target_ms=400, itl_max_ms=9.5,
    )  # fmt: skip
    submit = node.submits[-1]
    ids = np.array(tokenizer.encode(PROMPT * 5), dtype=np.int32)
    assert submit.prompt_token_ids == ids.tobytes()
    assert submit.sample_indices == (0, 1)
    assert submit.priority == -2
    assert submit.targets == Targets(ttft_s=0.4, itl_max_s=0.0095)
    assert 0 <= submit.waited_s < 60
    assert (submit.attempt, submit.mode, submit.use_prefix_cache) == (1, "full", True)
    sampling = submit.sampling
    assert sampling.logit_bias == ((3, 1.5), (7, -100.0))
    assert sampling.seed == (1 << 64) - 1
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    assert penalties == (1.1, -0.5, 1.0)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ((399,), True, 2)
    complete(router, max_tokens=1)
    complete(router, max_tokens=1)
    assert node.submits[-1].sampling.seed != node.submits[-2].sampling.seed


def test_max_tokens_defaults_to_16_or_what_fits(router: RouterInThread) -> None:
    assert complete(router)["usage"]["completion_tokens"] == 16
    assert complete(router, prompt=[5] * 505)["usage"]["completion_tokens"] == 7


def test_echo_and_logprobs(router: RouterInThread, tokenizer: Tokenizer) -> None:
    answer = complete(router, max_tokens=3, echo=True, logprobs=2)
    choice, prompt_ids, ids = answer["choices"][0], tokenizer.encode(PROMPT), expected(tokenizer, 3)
    assert choice["text"] == PROMPT + tokenizer.decode(ids)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in prompt_ids + ids]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    offsets = logprobs["text_offset"]
    assert offsets[: len(prompt_ids)] == [len(tokenizer.decode(prompt_ids[:i])) for i in range(len(prompt_ids))]
    assert offsets[len(prompt_ids)] == len(PROMPT)


def test_echo_alone_scores_a_prompt(router: RouterInThread) -> None:
    answer = complete(router, max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_prompt_logprobs(router: RouterInThread, node: StandInNode, tokenizer: Tokenizer) -> None:
    table = complete(router, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    ids = tokenizer.encode(PROMPT)
    assert table[0] is None
    assert [next(iter(row)) for row in table[1:]] == [str(i) for i in ids[1:]]
    assert table[1][str(ids[1])]["decoded_token"] == tokenizer.token_text(ids[1])
    assert not node.submits[-1].use_prefix_cache


def test_best_of_returns_the_most_likely(router: RouterInThread, tokenizer: Tokenizer) -> None:
    every = complete(router, max_tokens=4, n=4, logprobs=0)["choices"]
    best = complete(router, max_tokens=4, n=2, best_of=4)
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["logprobs"] for choice in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == 16


def test_stop_strings_and_tokens(router: RouterInThread, node: StandInNode, tokenizer: Tokenizer) -> None:
    ids = expected(tokenizer, 12)
    text = tokenizer.decode(ids)
    stop = text[4:6]
    answer = complete(router, max_tokens=12, stop=["never there", stop])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["usage"]["completion_tokens"] < 12
    answer = complete(router, max_tokens=12, stop_token_ids=[ids[5]], return_token_ids=True)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert answer["choices"][0]["prompt_token_ids"] == tokenizer.encode(PROMPT)


def test_a_stop_string_cancels_on_the_node(router: RouterInThread, node: StandInNode, tokenizer: Tokenizer) -> None:
    node.step_s = 0.01
    try:
        before = len(node.cancels)
        complete(router, max_tokens=400, stop=tokenizer.decode(expected(tokenizer, 12))[8])
        router.wait_idle()
        assert len(node.cancels) > before
    finally:
        node.step_s = 0.0


# --- streams --------------------------------------------------------------------------------------------------


def test_a_stream_has_one_event_a_token(router: RouterInThread, tokenizer: Tokenizer) -> None:
    chunks = events(router, max_tokens=6, return_token_ids=True)
    ids = expected(tokenizer, 6)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[i] for i in ids]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer.decode(ids)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == tokenizer.encode(PROMPT)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_last_when_asked_for(router: RouterInThread) -> None:
    chunks = events(router, max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_streams_of_many_choices(router: RouterInThread, tokenizer: Tokenizer) -> None:
    chunks = events(router, prompt=[PROMPT, "lazy dog"], n=2, max_tokens=3, echo=True, logprobs=1)
    for index, (prompt, sample) in enumerate([(PROMPT, 0), (PROMPT, 1), ("lazy dog", 0), ("lazy dog", 1)]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        ids = expected(tokenizer, 3, prompt, sample)
        assert "".join(choice["text"] for choice in mine) == prompt + tokenizer.decode(ids)
        tokens = [token for choice in mine for token in choice["logprobs"]["tokens"]]
        assert tokens == [tokenizer.token_text(i) for i in tokenizer.encode(prompt) + ids]


# --- the openai client ----------------------------------------------------------------------------------------


def test_the_openai_client(router: RouterInThread, tokenizer: Tokenizer) -> None:
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["stand-in"]
    assert client.models.retrieve("stand-in").id == "stand-in"
    ids = expected(tokenizer, 5)
    answer = client.completions.create(model="stand-in", prompt=PROMPT, max_tokens=5, logprobs=1)
    assert answer.choices[0].text == tokenizer.decode(ids)
    stream = client.completions.create(
        model="stand-in", prompt=PROMPT, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == tokenizer.decode(ids)
    assert chunks[-1].usage is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="stand-in", prompt=PROMPT, max_tokens=100_000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="generates text"):
        client.embeddings.create(model="stand-in", input="hi")
    client.close()


# --- the other paths ------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(router: RouterInThread, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = router.client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
    assert answer["token_strs"] == [tokenizer.token_string(i) for i in ids]
    assert router.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    assert router.client.post("/detokenize", json={"tokens": [VOCAB_SIZE]}).json()["error"]["param"] == "tokens"


def test_state_and_metrics(router: RouterInThread, node: StandInNode) -> None:
    complete(router, max_tokens=2)
    assert router.client.get("/health").json() == {"status": "ok"}
    assert router.client.get("/version").json() == {"version": version()} == {"version": tandem.__version__}
    assert router.client.get("/ready").json()["nodes"] == [{"node_id": node.node_id, "role": "unified"}]
    text = router.client.get("/metrics").text
    assert f'tandem_node_kv_blocks{{node="{node.node_id}",role="unified"}} 1000.0' in text
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert f"vllm:{name}_seconds_bucket" in text
    assert 'tandem_router_prompts_ended_total{outcome="finished"}' in text


def test_what_monitors_ask_has_a_head(router: RouterInThread) -> None:
    for path in ("/", "/health", "/ping", "/ready", "/version", "/v1/models", "/v1/models/stand-in", "/openapi.json"):
        whole, head = router.client.get(path), router.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))


def test_token_metrics_count_every_token_once(router: RouterInThread) -> None:
    def figures() -> dict[str, float]:
        lines = (line.rpartition(" ") for line in router.client.get("/metrics").text.splitlines() if line[0] != "#")
        return {name: float(value) for name, _, value in lines}

    before, began = figures(), time.monotonic()
    complete(router, max_tokens=6, n=2, ignore_eos=True)
    seconds = time.monotonic() - began
    gained = {name: value - before.get(name, 0.0) for name, value in figures().items()}
    model = '{model_name="stand-in"}'
    assert gained[f"vllm:generation_tokens_total{model}"] == gained[f"vllm:request_generation_tokens_sum{model}"] == 12
    assert gained[f"vllm:request_prompt_tokens_sum{model}"] == gained[f"vllm:prompt_tokens_total{model}"] > 0
    itl = gained['vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="stand-in"}']
    assert itl == gained[f"vllm:inter_token_latency_seconds_count{model}"] == 10
    assert 0 < gained[f"vllm:inter_token_latency_seconds_sum{model}"] < 2 * seconds, "of two samples"
    assert gained[f"vllm:time_to_first_token_seconds_count{model}"] == 1
    assert gained[f"vllm:e2e_request_latency_seconds_count{model}"] == 1
    assert gained['vllm:request_success_total{finished_reason="length",model_name="stand-in"}'] == 2


def test_paths_and_methods_that_are_not_there(router: RouterInThread) -> None:
    for method, path, status in [
        ("GET", "/v2", 404),
        ("GET", "/tokenizer_info", 404),
        ("POST", "/v1/moderations", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ]:
        response = router.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
