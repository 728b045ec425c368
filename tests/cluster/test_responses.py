"""/v1/responses as openai's client sees it, on one node and split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from router_in_thread import RouterInThread
from scripted_model import SCRIPTS

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("get_weather", "get_time")
]
WEATHER = {"city": 'Paris, "F"', "days": [1, 2]}
OPENED = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
CLOSED = ["response.content_part.done", "response.output_item.done", "response.completed"]


def asked(script: str = "hello", **fields: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"script": script}, **fields.pop("extra_body", {})}
    return {"model": "scripted", "input": "What is two and two?", "extra_body": extra, **fields}


def create(client: openai.OpenAI, script: str = "hello", **fields: Any) -> Any:
    return client.responses.create(**asked(script, **fields))


def plain(response: Any) -> list[Any]:
    """Its items without what is made up for each."""
    found = []
    for item in response.output:
        parts = [part.text for part in getattr(item, "content", None) or []]
        found.append((item.type, item.status, parts, getattr(item, "name", ""), getattr(item, "arguments", "")))
    return found


def test_an_answer(client: openai.OpenAI, model: tuple[Path, Any]) -> None:
    answer = create(client, instructions="Be brief.", metadata={"a": "b"}, store=True, temperature=0.5)
    assert (answer.object, answer.status, answer.model, answer.id[:5]) == ("response", "completed", "scripted", "resp_")
    assert answer.output_text == SCRIPTS["hello"]
    assert (answer.store, answer.metadata, answer.temperature, answer.instructions) == (
        False,
        {"a": "b"},
        0.5,
        "Be brief.",
    )
    assert answer.usage.output_tokens == len(model[1]["hello"]) + 1  # and the end
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = create(client, instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens >= 16
    cut = create(client, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    assert SCRIPTS["hello"].startswith(cut.output_text)


def test_events_come_in_openais_order(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [*OPENED, *["response.output_text.delta"] * len(deltas), "response.output_text.done", *CLOSED]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(deltas) > 3
    assert "".join(deltas) == SCRIPTS["hello"]
    assert events[0].response.status == "in_progress"
    whole = create(client)
    assert plain(events[-1].response) == plain(whole)
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    cut = [event.type for event in create(client, stream=True, max_output_tokens=2)]
    assert cut[-1] == "response.incomplete"


def test_the_streaming_helper_gathers_items(client: openai.OpenAI) -> None:
    with client.responses.stream(**asked("call", tools=TOOLS)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert kinds.count("response.function_call_arguments.delta") > 4, "arguments came in one piece"
    assert "response.reasoning_text.delta" in kinds
    whole = create(client, "call", tools=TOOLS)
    assert plain(final) == plain(whole)
    reasoning, message, weather, time = whole.output
    assert [part.text for part in reasoning.content] == ["I need both."]
    assert message.content[0].text == "One moment."
    assert (weather.type, weather.name, json.loads(weather.arguments)) == ("function_call", "get_weather", WEATHER)
    assert (time.name, time.arguments) == ("get_time", "{}")
    assert weather.call_id != time.call_id
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    one = create(client, "call", tools=TOOLS, parallel_tool_calls=False)
    assert [item.name for item in one.output if item.type == "function_call"] == ["get_weather"]


def test_a_conversation_goes_on_with_the_items_of_before(client: openai.OpenAI, router: RouterInThread) -> None:
    """As chat's prompt of the same conversation, which the template checks: token for token."""
    before = create(client, "call", tools=TOOLS)
    calls = [item for item in before.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
    items = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in before.output), *results]
    answer = create(client, input=items, tools=TOOLS, instructions="Be brief.")
    assert answer.output_text == SCRIPTS["hello"]
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    said = [{"id": "c", "type": "function", "function": function} for function in functions]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "One moment.", "tool_calls": said},
        {"role": "tool", "content": "fine"},
        {"role": "tool", "content": "fine"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    counted = router.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"]
    assert answer.usage.input_tokens == counted


def test_log_probabilities_are_of_the_message(client: openai.OpenAI, model: tuple[Path, Any]) -> None:
    answer = create(client, "think", top_logprobs=2, include=["message.output_text.logprobs"])
    rows = answer.output[1].content[0].logprobs
    assert "".join(row.token for row in rows).endswith(f"{answer.output_text}</s>")
    assert "carefully" not in "".join(row.token for row in rows)
    assert all(len(row.top_logprobs) == 2 for row in rows)
    events = list(create(client, "think", top_logprobs=2, stream=True))
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [row.token for row in done.logprobs] == [row.token for row in rows]


def test_output_and_calls_are_forced(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "said", "schema": schema, "strict": True}
    answer = create(client, "think", text={"format": form}, temperature=0, max_output_tokens=200)
    assert json.loads(answer.output_text)["answer"] in ("yes", "no")
    assert answer.text.format.name == "said"
    with client.responses.stream(**asked("think", text={"format": form}, temperature=0)) as stream:
        assert json.loads(stream.get_final_response().output_text)["answer"] in ("yes", "no")
    fields = {"tools": TOOLS[:1], "tool_choice": {"type": "function", "name": "get_weather"}}
    calls = [
        item
        for item in create(client, "call", **fields, temperature=0, max_output_tokens=300).output
        if item.type == "function_call"
    ]
    assert [call.name for call in calls] == ["get_weather"]
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, text={"format": {"type": "grammar"}})
    assert raised.value.param == "text"


@pytest.mark.parametrize(
    ("fields", "param", "remedy"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items"),
        ({"background": True}, "background", "leave it out"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", r"input\[0\].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", r"input\[0\].content\[0\]"),
        ({"tools": [{"type": "web_search"}]}, "tools", "functions alone"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice", "none of the tools"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000.* 1024"),
        ({"text": {"format": {"type": "yaml"}}}, "text", r"text\.format\.type is 'yaml'"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text", r"text\.format\.schema must be"),
        ({"extra_body": {"response_format": {"type": "yaml"}}}, "response_format", r"response_format\.type is 'yaml'"),
        ({"extra_body": {"n": 2}}, "n", "n"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, remedy: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=remedy) as raised:
        create(client, **fields)
    assert raised.value.param == param
