"""What /v1/responses makes of bodies and of output, without nodes: fuzzed bodies, numbered events, failures."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mutations import json_cases
from router_in_thread import VOCAB_SIZE

from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.engine.contracts.errors import InvalidRequestError, NodeFailedError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.router.chat.chat import Chat
from tandem.router.requests.sample_output import ChatLogprobs, Piece
from tandem.router.responses.body import parse_responses
from tandem.router.responses.format import ResponsesAnswer, ResponsesFormat
from tandem.router.responses.input_items import messages_of
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.completion import ModelFacts
from tandem.router.text.tokenizer import Tokenizer

TEMPLATE = "<think><tool_call>{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% endfor %}{{ tools }}"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
BODIES = [
    {"input": "hello", "instructions": "be", "max_output_tokens": 3, "tools": [TOOL], "tool_choice": "auto"},
    {"input": [{"role": "user", "content": "é"}, REASONING, SAID, CALL, RESULT], "text": {"format": {"type": "text"}}},
    {"input": [SAID], "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "top_logprobs": 2},
]


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat(folder, Tokenizer(folder), RouterOptions(ModelOptions(str(folder)), chat_template=TEMPLATE))


@pytest.mark.parametrize("number", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_body_becomes_a_prompt_or_one_error(chat: Chat, number: int) -> None:
    facts, bodies, num_read = ModelFacts("m", 512, VOCAB_SIZE), BodyReader(), 0
    for data in json_cases(random.Random(number), BODIES, number):
        with contextlib.suppress(InvalidRequestError):
            body = parse_responses(bodies, data).as_chat()
            assert chat.prompt(body, facts).token_ids
            assert body.as_completion().num_samples == 1
            num_read += 1
    assert num_read > number // 20


def test_two_formats_of_one_answer_are_refused() -> None:
    both = {"input": "a", "text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}
    with pytest.raises(InvalidRequestError, match=r"text\.format and response_format .*; give one") as raised:
        parse_responses(BodyReader(), msgspec.json.encode(both))
    assert raised.value.param == "text"
    for one in ({"text": {"verbosity": "medium"}}, {"response_format": None}):
        parse_responses(BodyReader(), msgspec.json.encode({**both, **one}))


def test_what_an_assistant_did_in_one_go_is_one_message() -> None:
    user = {"role": "user", "content": "a"}
    roles = [message["role"] for message in messages_of([user, REASONING, SAID, CALL, CALL, RESULT, SAID], "be")]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    [said] = messages_of([REASONING, SAID, CALL], None)
    assert (said["reasoning_content"], said["content"], len(said["tool_calls"])) == ("hm", "yes", 1)
    assert [set(message) for message in messages_of([SAID, SAID, REASONING, CALL], None)] == [
        {"role", "content"},
        {"role", "content"},
        {"role", "reasoning_content", "tool_calls"},
    ]


def form_of(chat: Chat, **fields: Any) -> ResponsesFormat:
    body = parse_responses(BodyReader(), msgspec.json.encode({"input": "a", "tools": [TOOL], **fields}))
    return ResponsesFormat("resp_1", "m", body, SamplingParams(), ResponsesAnswer(body.as_chat(), chat, "a"))


TEXT = '<think>\nhm\n</think>\n\nyes <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nmore'


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_however_output_is_cut_its_events_add_up(chat: Chat) -> None:
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for cut in range(1, len(TEXT)):
        form = form_of(chat)
        writer = form.writer()
        data = writer.piece(0, Piece(TEXT[:cut], (1,), None, None))
        data += writer.piece(0, Piece(TEXT[cut:], (2,), None, "stop"))
        data += writer.end({**usage, **form.usage_details()})
        events = events_of(data)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
        added: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                assert event["item_id"] == output[event["output_index"]]["id"]
                added[event["output_index"]] = added.get(event["output_index"], "") + event["delta"]
        assert added == {0: "hm", 1: "yes", 2: '{"a": 1}', 3: "\nmore"}


def test_reasoning_may_end_at_any_token_of_a_piece(chat: Chat) -> None:
    texts = ["<think>", "h", "m", "</think>", "y", "es"]
    rows = ChatLogprobs([{"token": text} for text in texts])
    ends = [sum(map(len, texts[:count])) for count in range(1, len(texts))]
    form = form_of(chat, top_logprobs=1)
    piece = Piece("".join(texts), range(len(texts)), rows, "stop", None, ends)
    events = events_of(form.writer().piece(0, piece))
    assert form.answer.num_reasoning_tokens == 3
    said = [event for event in events if event["type"] == "response.output_text.done"]
    assert [(event["text"], [row["token"] for row in event["logprobs"]]) for event in said] == [("yes", texts[3:])]


def test_a_failure_is_the_last_event(chat: Chat) -> None:
    writer = form_of(chat).writer()
    writer.piece(0, Piece("yes", (1,), None, None))
    [event] = events_of(writer.failed(NodeFailedError("the node is gone")))
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "the node is gone"}
