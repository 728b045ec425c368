"""What goes into a request of the Python API and what comes back, without a server."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pydantic
import pytest
from PIL import Image

import tandem
from tandem.engine.contracts.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NodeFailedError,
    OverloadedError,
    TandemError,
)
from tandem.llm.http_errors import error_of
from tandem.llm.local_server import LocalServer
from tandem.llm.multi_modal import as_urls
from tandem.llm.outputs import CompletionOutput, Logprob, RequestOutput
from tandem.llm.params import SamplingParams, StructuredOutputsParams
from tandem.llm.prompts import read_media, read_prompts
from tandem.router.text.openai_api import CompletionBody, StructuredOutputs, error_body, parse_body
from tandem.router.text.samples import decoded


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("text", ["text"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ({"prompt": "a"}, ["a"]),
        ([{"prompt_token_ids": (4, 5)}, "b"], [[4, 5], "b"]),
        ([], []),
    ],
)
def test_prompts_are_read_in_all_their_forms(given: Any, read: list[Any]) -> None:
    assert read_prompts(given) == read


@pytest.mark.parametrize("given", [3, [3.5], [[1, "a"]], {"prompt": 5}, [{"images": []}], [True]])
def test_what_is_no_prompt_is_refused_in_words(given: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        read_prompts(given)


def test_what_only_other_engines_serve_is_refused_by_name() -> None:
    for name in ("multi_modal_uuids", "lora_request", "prompt_embeds"):
        assert read_prompts([{"prompt": "a", name: None}]) == ["a"]
        with pytest.raises(InvalidRequestError, match=name) as raised:
            read_prompts([{"prompt": "a", name: {}}])
        assert raised.value.param == name


def test_images_and_sounds_become_urls() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    given = {"image": [pixels, Image.fromarray(pixels), b"file", "https://example.org/a.png"]}
    array, picture, file, url = as_urls(given)["image"]
    assert array == picture
    prefix, _, encoded = array.partition(",")
    assert prefix == "data:image/*;base64"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))), pixels)
    assert (file, url) == ("data:image/*;base64,ZmlsZQ==", "https://example.org/a.png")
    samples = np.array([[0.5, -0.5], [1.0, -1.0], [2.0, 0.0]], np.float32)
    [sound] = as_urls({"audio": (samples, 8000)})["audio"]
    heard = decoded(base64.b64decode(sound.partition(",")[2]), 8000, 1.0)
    assert heard == pytest.approx([0.0, 0.0, 0.5], abs=1e-6)  # one channel, in [-1, 1]


@pytest.mark.parametrize("data", [{"image": 3}, {"image": "cat.png"}, {"audio": [1.0]}, {"video": b""}, [b""]])
def test_what_is_no_image_or_sound_is_refused_in_words(data: Any) -> None:
    with pytest.raises(ValueError, match="multi_modal_data"):
        read_media({"prompt": "a", "multi_modal_data": data})


def test_embeddings_are_of_text_alone() -> None:
    with pytest.raises(InvalidRequestError, match="multi_modal_data"):
        read_prompts({"prompt": "a", "multi_modal_data": {"image": b""}})


def test_every_setting_is_a_field_that_the_server_takes() -> None:
    """Under the same name, in a form that it parses."""
    params = SamplingParams(
        n=2, best_of=3, max_tokens=5, min_tokens=1, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1,
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={7: -1.0}, seed=4,
        stop=("x", "y"), stop_token_ids=(1, 2), ignore_eos=True, logprobs=1, prompt_logprobs=1, priority=2,
        ttft_target_ms=300, tpot_target_ms=20, itl_max_ms=50, allowed_token_ids=(1, 2), bad_words=("no",),
        include_stop_str_in_output=True,
        use_prefix_cache=False, cache_salt="s", structured_outputs=StructuredOutputsParams(choice=("a", "b")),
    )  # fmt: skip
    beams = SamplingParams(
        n=2, temperature=0.0, use_beam_search=True, beam_width=3, length_penalty=0.5, early_stopping="never"
    )
    import msgspec

    searched = parse_body(CompletionBody, msgspec.json.encode({"prompt": "p", **beams.as_body()}))
    assert (searched.beam_width, searched.length_penalty, searched.early_stopping) == (3, 0.5, "never")
    body = parse_body(CompletionBody, msgspec.json.encode({"prompt": "p", **params.as_body()}))
    assert (body.n, body.best_of, body.stops, body.logit_bias) == (2, 3, ["x", "y"], {"7": -1.0})
    assert body.structured_outputs is not None
    assert body.structured_outputs.choice == ["a", "b"]
    assert {*SamplingParams.__dataclass_fields__, "return_tokens_as_token_ids"} == {*params.as_body(), *beams.as_body()}
    assert SamplingParams().as_body() == {"n": 1, "max_tokens": 16}


def test_what_the_output_must_be_may_be_a_model() -> None:
    class Point(pydantic.BaseModel):
        x: int

    assert StructuredOutputsParams(json=Point).as_body() == {"json": Point.model_json_schema()}
    assert {*StructuredOutputsParams.__dataclass_fields__} <= {*StructuredOutputs.__struct_fields__}
    with pytest.raises(ValueError, match="no schema"):
        StructuredOutputsParams(json=int).as_body()


def test_pieces_add_up_to_an_output() -> None:
    output = RequestOutput("r", "p", [], [CompletionOutput(0, num_rivals=2), CompletionOutput(1)])
    row = {"token_id:1:a": -2.5, "token_id:7:b:c": -0.5, "token_id:8:": -1.5}
    logprobs = {"tokens": ["token_id:1:a"], "token_logprobs": [-2.5], "top_logprobs": [row], "text_offset": [0]}
    first = {"index": 0, "text": "a", "finish_reason": None, "logprobs": logprobs, "token_ids": [1]}
    table = [None, {"9": {"logprob": -3.0, "rank": 4, "decoded_token": "x"}}]
    output.add({"choices": [{**first, "prompt_token_ids": [9], "prompt_logprobs": table}], "usage": None})
    output.add({"choices": [{**first, "finish_reason": "stop"}]})
    output.add({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}})
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("aa", [1, 1], "stop")
    assert sample.cumulative_logprob == -5.0
    found = {1: Logprob(-2.5, None, "a"), 7: Logprob(-0.5, 1, "b:c"), 8: Logprob(-1.5, 2, "")}
    assert sample.logprobs == [found] * 2
    assert output.prompt_logprobs == [None, {9: Logprob(-3.0, 4, "x")}]
    assert (output.prompt_token_ids, output.num_cached_tokens) == ([9], 3)
    output.end("abort")
    assert [each.finish_reason for each in output.outputs] == ["stop", "abort"]


@pytest.mark.parametrize(
    ("num_rivals", "row", "rank"),
    [
        (0, {"token_id:1:a": -2.5}, None),  # nothing says how many are likelier
        (1, {"token_id:1:a": -0.5}, 1),
        (1, {"token_id:1:a": -2.5, "token_id:7:b": -0.5}, None),
        (2, {"token_id:1:a": -2.5, "token_id:7:b": -0.5}, 2),
        (2, {"token_id:1:a": -2.5, "token_id:7:b": -0.5, "token_id:8:c": -1.5}, None),
    ],
)
def test_a_drawn_token_has_its_rank_if_that_is_known(num_rivals: int, row: dict[str, float], rank: int | None) -> None:
    sample = CompletionOutput(0, num_rivals=num_rivals)
    logprobs = {"tokens": ["token_id:1:a"], "top_logprobs": [row]}
    sample.add({"text": "a", "finish_reason": None, "logprobs": logprobs, "token_ids": [1]})
    assert sample.logprobs is not None
    assert sample.logprobs[0][1].rank == rank


def test_messages_and_their_deltas_add_up_alike() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    named = {"token": "token_id:3:x", "logprob": -1.0}
    entry = {**named, "top_logprobs": [named]}
    message = {"content": "yes", "reasoning_content": "hm", "tool_calls": [call]}
    whole, streamed = CompletionOutput(0, num_rivals=1), CompletionOutput(0, num_rivals=1)
    whole.add(
        {"message": message, "finish_reason": "tool_calls", "logprobs": {"content": [entry]}, "token_ids": [1, 2]}
    )
    head = {**call, "index": 0, "function": {"name": "find", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "yes"},
        {"tool_calls": [head]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for delta in deltas:
        streamed.add({"delta": delta, "finish_reason": None})
    end = {"delta": {}, "finish_reason": "tool_calls", "logprobs": {"content": [entry]}, "token_ids": [1, 2]}
    streamed.add(end)
    assert streamed == whole
    assert (whole.tool_calls, whole.reasoning, whole.logprobs) == ([call], "hm", [{3: Logprob(-1.0, 1, "x")}])


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("wrong", param="n"),
        OverloadedError("full"),
        DeadlineError("late"),
        NodeFailedError("gone"),
        TandemError("ours"),
    ],
)
@pytest.mark.parametrize("with_status", [True, False])
def test_an_error_is_raised_as_the_class_that_the_server_had(error: TandemError, with_status: bool) -> None:
    """Also out of a stream, whose events have no status."""
    import json

    found = error_of(json.loads(error_body(error)), error.status if with_status else None)
    assert (found.message, found.param) == (error.message, error.param)
    assert isinstance(found, type(error)) or (isinstance(error, TandemError) and found.type == error.type)


def test_answers_that_are_no_error_objects_are_errors_all_the_same() -> None:
    assert "418" in error_of("<html>", 418).message
    assert isinstance(error_of(None, 404), InvalidRequestError)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"port": 8000}, "url="),
        ({"max_num_seqs": "x"}, "whole number"),
    ],
)
def test_a_wrong_option_starts_nothing(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        LocalServer("", options, 1.0, quiet=True)


def test_the_package_offers_what_it_names() -> None:
    for name in tandem.__all__:
        assert getattr(tandem, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = tandem.Nothing
