"""Bodies of chat, fuzzed: each becomes a prompt and a completion, or one error that a client gets as 400."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from mutations import json_cases
from router_in_thread import VOCAB_SIZE

from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import ChatBody, parse_chat, parse_tokenize
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.completion import ModelFacts
from tandem.router.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}{{ self_made }}{% if add_generation_prompt %}:{% endif %}"
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHARED = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [TOOL],
    "chat_template_kwargs": {"self_made": 1, "self": 2, "variables": 3},
}
BODIES = [
    {**SHARED, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "tool_choice": "auto", "n": 2, "seed": 1},
    {**SHARED, "stream": True, "stream_options": {"include_usage": True}, "continue_final_message": True, "stop": "x"},
    {**SHARED, "response_format": {"type": "text"}, "modalities": ["text"], "documents": [{"a": "b"}]},
]


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    options = RouterOptions(ModelOptions(str(folder)), chat_template=TEMPLATE, tool_call_parser="hermes")
    return Chat(folder, Tokenizer(folder), options)


@pytest.mark.parametrize("read", [parse_chat, parse_tokenize])
@pytest.mark.parametrize("number", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_body_becomes_a_prompt_or_one_error(chat: Chat, read: object, number: int) -> None:
    facts, bodies = ModelFacts("m", 512, VOCAB_SIZE), BodyReader()
    valid = BODIES if read is parse_chat else [SHARED, {**SHARED, "continue_final_message": True}, {"prompt": "a"}]
    num_read = 0
    for data in json_cases(random.Random(number), valid, number):
        with contextlib.suppress(InvalidRequestError):
            body = read(bodies, data)  # type: ignore[operator]
            if hasattr(body, "messages"):
                assert chat.prompt(body, facts).token_ids
            if isinstance(body, ChatBody):
                chat.check_tools(body)
                body.as_completion()
            num_read += 1
    assert num_read > number // 100, "some of what is nearly right must get through, or this proves little"
