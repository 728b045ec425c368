"""Chat as openai's client sees it, on one node and split: every feature runs in both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from router_in_thread import RouterInThread
from scripted_cluster import openai_client, serve
from scripted_model import SCRIPTS

from in_process_cluster import Node

ASKED: list[Any] = [
    {"role": "developer", "content": "Be brief, and be right."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "two and two?"}]},
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_time")
]
WEATHER = {"city": 'Paris, "F"', "days": [1, 2]}


def create(client: openai.OpenAI, script: str = "hello", messages: list[Any] = ASKED, **fields: Any) -> Any:
    extra = {"chat_template_kwargs": {"script": script}, **fields.pop("extra_body", {})}
    return client.chat.completions.create(model="scripted", messages=messages, extra_body=extra, **fields)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas of choice 0 add up to, with its finish reason; and all chunks."""
    chunks = list(create(client, stream=True, **fields))
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ends": []}
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == 0):
        said["content"] += choice.delta.content or ""
        said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(said["calls"])
                said["calls"].append([part.function.name, ""])
            said["calls"][part.index][1] += part.function.arguments or ""
        said["ends"] += [choice.finish_reason] * (choice.finish_reason is not None)
    return said, chunks


def test_an_answer(client: openai.OpenAI, router: RouterInThread, nodes: list[Node], model: tuple[Path, Any]) -> None:
    answer = create(client)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "scripted", "chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", SCRIPTS["hello"])
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("stop", None, None)
    assert answer.usage.completion_tokens == len(model[1]["hello"]) + 1  # and the end
    again = create(client)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    if len(nodes) > 1:
        assert nodes[1].process.logic.handoffs.sink.counters.commits >= 1, "nothing was handed over"


# README says: "by the model's own chat template"
def test_the_prompt_is_what_transformers_makes_of_the_messages(router: RouterInThread, model: tuple[Path, Any]) -> None:
    from transformers import AutoTokenizer

    texts = ["Be brief, and be right.", "What is\ntwo and two?"]
    plain = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    for fields in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}):
        arguments = {"add_generation_prompt": True, **fields}
        expected = tokenizer.apply_chat_template(plain, tokenize=True, return_dict=False, **arguments)
        answer = router.client.post("/tokenize", json={"messages": ASKED, **fields})
        assert answer.json()["tokens"] == expected, fields


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    said, chunks = streamed(client, stream_options={"include_usage": True})
    assert (said["content"], said["ends"]) == (SCRIPTS["hello"], ["stop"])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == create(client).usage.total_tokens
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    _, counted = streamed(client, stream_options=options)
    totals = [chunk.usage.completion_tokens for chunk in counted]
    assert totals == sorted(totals)
    assert totals[-1] == chunks[-1].usage.completion_tokens
    _, uncounted = streamed(client, stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage is None for chunk in uncounted), "as vLLM: of include_usage there is no part without it"


def test_samples_ends_and_sampling(client: openai.OpenAI) -> None:
    answer = create(client, n=3, seed=7, temperature=0.7, top_p=0.9, presence_penalty=0.1, user="me", store=True)
    assert [choice.message.content for choice in answer.choices] == [SCRIPTS["hello"]] * 3
    for name in ("max_tokens", "max_completion_tokens"):
        [choice] = create(client, **{name: 2}).choices
        assert choice.finish_reason == "length"
        assert SCRIPTS["hello"].startswith(choice.message.content)
    [choice] = create(client, stop=[", this"]).choices
    assert (choice.message.content, choice.finish_reason) == ("Hello there", "stop")
    said, _ = streamed(client, stop=", this", n=2)
    assert (said["content"], said["ends"]) == ("Hello there", ["stop"])


def test_fields_beyond_openais_own(client: openai.OpenAI, model: tuple[Path, Any]) -> None:
    """They mean the same on one node and split, whole and streamed."""
    pieces = model[1]["hello"]

    def said(**extra: Any) -> tuple[str, str]:
        [choice] = create(client, extra_body=extra).choices
        assert streamed(client, extra_body=extra)[0]["content"] == choice.message.content
        return choice.message.content, choice.finish_reason

    assert said(stop=", this", include_stop_str_in_output=True) == ("Hello there, this", "stop")
    assert said(skip_special_tokens=False) == (SCRIPTS["hello"], "stop")
    assert said(skip_special_tokens=False, include_stop_str_in_output=True) == (SCRIPTS["hello"] + "</s>", "stop")
    assert said(min_tokens=2, ignore_eos=False, top_k=1, request_id="r") == (SCRIPTS["hello"], "stop")
    answer = create(client, logprobs=True, extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True})
    [choice] = answer.choices
    assert [row.token for row in choice.logprobs.content] == [f"token_id:{i}" for i in choice.token_ids]
    assert len(choice.token_ids) == len(pieces) + 1
    assert answer.prompt_token_ids == choice.prompt_token_ids, "vLLM has it beside the choices"
    _, chunks = streamed(client, extra_body={"return_token_ids": True})
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks[:2]] == [answer.prompt_token_ids, None]
    assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []] == choice.token_ids
    cut = create(client, max_tokens=1, extra_body={"truncate_prompt_tokens": 3, "timeout": 50, "unheard_of": 1})
    assert cut.usage.prompt_tokens == 3
    assert create(client, extra_body={"request_id": "mine"}).id == "chatcmpl-mine"


def test_log_probabilities(client: openai.OpenAI, model: tuple[Path, Any]) -> None:
    pieces = model[1]["hello"]
    [choice] = create(client, logprobs=True, top_logprobs=2).choices
    rows = choice.logprobs.content
    assert [row.token for row in rows] == [*pieces, "</s>"]
    assert all(bytes(row.bytes).decode() == row.token and row.logprob > -0.01 for row in rows)
    assert all(len(row.top_logprobs) == 2 and row.top_logprobs[0].token == row.token for row in rows)
    _, chunks = streamed(client, logprobs=True, max_tokens=3)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [row.token for part in parts if part for row in part.content] == pieces[:3]


def test_a_last_message_is_continued(client: openai.OpenAI, model: tuple[Path, Any]) -> None:
    begun = "".join(model[1]["hello"][:3])
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    answer = create(client, messages=messages, extra_body={"continue_final_message": True})
    assert begun + answer.choices[0].message.content == SCRIPTS["hello"]


def test_reasoning_is_split_off(client: openai.OpenAI) -> None:
    answer = create(client, "think")
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two, carefully.", "It is four.")
    assert message.reasoning == message.reasoning_content
    num_tokens = answer.usage.completion_tokens
    assert 5 <= answer.usage.completion_tokens_details.reasoning_tokens < num_tokens
    said, _ = streamed(client, script="think")
    assert (said["reasoning"], said["content"]) == (message.reasoning_content, message.content)
    hidden = create(client, "think", extra_body={"include_reasoning": False}).choices[0].message
    assert (getattr(hidden, "reasoning_content", None), hidden.content) == (None, "It is four.")


# README says: "(called in parallel, streamed)"
def test_tools_are_called(client: openai.OpenAI) -> None:
    [choice] = create(client, "call", tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.reasoning_content == "I need both."
    weather, time = choice.message.tool_calls
    assert weather.id != time.id
    assert (weather.type, weather.function.name) == ("function", "get_weather")
    assert json.loads(weather.function.arguments) == WEATHER
    assert (time.function.name, time.function.arguments) == ("get_time", "{}")

    said, chunks = streamed(client, script="call", tools=TOOLS, tool_choice="auto")
    assert [[name, json.loads(text)] for name, text in said["calls"]] == [["get_weather", WEATHER], ["get_time", {}]]
    assert (said["content"], said["reasoning"], said["ends"]) == ("One moment.", "I need both.", ["tool_calls"])
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert len([call for call in calls if call.index == 0]) > 4, "arguments came in one piece"

    one = create(client, "call", tools=TOOLS, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in one.tool_calls] == ["get_weather"]
    none = create(client, "call", tools=TOOLS, tool_choice="none").choices[0]
    assert (none.message.tool_calls, none.finish_reason) == (None, "stop")
    assert "<tool_call>" in none.message.content
    cut = create(client, "call", tools=TOOLS, stop="days").choices[0]
    assert cut.message.tool_calls[0].function.arguments.startswith('{"city": "Paris')


FORCED_ONCE: dict[str, Any] = {}


def same_in_both(name: str, answer: Any) -> Any:
    """What one node said and what a split cluster says are equal: whichever comes second is compared."""
    choices = [choice.model_dump(exclude={"message": {"tool_calls": {"__all__": {"id"}}}}) for choice in answer.choices]
    assert FORCED_ONCE.setdefault(name, choices) == choices
    return answer


TAG = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[0-9]{1,4}"}, "end": ">"}


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Annotated[list[Annotated[int, pydantic.Field(ge=1, le=31)]], pydantic.Field(max_length=3)]
    note: Annotated[str, pydantic.Field(max_length=12)] | None


def forced_tool(**more: Any) -> Any:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": {**city, "additionalProperties": False}, **more}
    return {"type": "function", "function": function}


# README says: "held to a JSON schema, a regular expression, a choice or a grammar"
def test_answers_are_held_to_what_is_asked(client: openai.OpenAI) -> None:
    thought = [*ASKED, {"role": "assistant", "content": "<think>Well.</think>"}]
    fields: Any = {"model": "scripted", "messages": thought, "n": 2, "temperature": 0.0, "max_tokens": 200}
    fields["extra_body"] = {"continue_final_message": True}
    parsed = same_in_both("parsed", client.chat.completions.parse(response_format=Trip, logprobs=True, **fields))
    assert all(isinstance(choice.message.parsed, Trip) for choice in parsed.choices)
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    for name, asked, fits in (
        ("regex", {"regex": "[a-f]{3,9}x"}, r"[a-f]{3,9}x"), ("choice", {"choice": ["yes", "no"]}, "yes|no"),
        ("grammar", {"grammar": 'start: "<" start ">" | "0"'}, "<*0>*"),
        ("schema", {"json": {"const": {"a": [1]}}}, r'\{\s*"a"\s*:\s*\[\s*1\s*\]\s*\}'),
        ("tag", {"structural_tag": {"format": TAG}}, "<[0-9]+>"),
    ):  # fmt: skip
        body = {"structured_outputs": asked}
        [choice] = same_in_both(name, create(client, extra_body=body, max_tokens=60, seed=5)).choices
        assert re.fullmatch(fits, choice.message.content), (name, choice.message.content)
        said, _ = streamed(client, extra_body=body, max_tokens=60, seed=5)
        assert (said["content"], said["ends"]) == (choice.message.content, [choice.finish_reason])
        completed = client.completions.create(
            model="scripted", prompt="Hello", temperature=0.7, seed=1, extra_body=body, max_tokens=60
        )
        assert re.fullmatch(fits, completed.choices[0].text)
    json_object: Any = {"response_format": {"type": "json_object"}}
    [cut] = client.completions.create(model="scripted", prompt="Hello", extra_body=json_object, max_tokens=1).choices
    assert (cut.text[:1], cut.finish_reason) == ("{", "length"), "one token, which may be longer than the brace"


def test_tokens_are_allowed_and_words_are_banned(
    client: openai.OpenAI, router: RouterInThread, model: tuple[Path, dict[str, list[str]]]
) -> None:
    pieces = model[1]["hello"]
    for first, last in ((1, 2), (4, 6)):  # a token, and a sequence of them
        banned, begin = "".join(pieces[first:last]), "".join(pieces[: last - 1])
        [choice] = same_in_both(banned, create(client, extra_body={"bad_words": [banned]}, max_tokens=30)).choices
        assert choice.message.content.startswith(begin)
        assert not choice.message.content.startswith(begin + pieces[last - 1])
    vowels = router.client.post("/tokenize", json={"prompt": "aeiou"}).json()["tokens"]
    held: Any = {"extra_body": {"allowed_token_ids": vowels}, "max_tokens": 12, "seed": 3, "temperature": 1.0}
    [choice] = same_in_both("vowels", create(client, **held)).choices
    assert (set(choice.message.content) <= set("aeiou"), len(choice.message.content)) == (True, 12)
    held["extra_body"] = {"allowed_token_ids": [vowels[0]], "structured_outputs": {"regex": "[b-z]+"}}
    with pytest.raises(openai.BadRequestError, match="leave no token"):
        create(client, **held)


def test_the_grammar_begins_behind_the_reasoning(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": "It is (four|five)"}}
    [choice] = same_in_both("thought", create(client, "think", extra_body=body, seed=5)).choices
    assert choice.message.reasoning_content == "Two and two, carefully."
    assert (choice.message.content, choice.finish_reason) == ("It is four", "stop")


# README says: "`tool_choice` forces calls"
def test_calls_are_forced(client: openai.OpenAI) -> None:
    tools = [forced_tool(), TOOLS[1] | {"function": {"name": "get_time", "parameters": {"enum": [{}]}}}]
    fields: Any = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 5,
    }
    [choice] = same_in_both("required", create(client, "hello", **fields)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    allowed = {"get_weather": [{"city": "Rome"}, {"city": "Oslo"}], "get_time": [{}]}
    assert json.loads(call.function.arguments) in allowed[call.function.name]
    said, _ = streamed(client, script="hello", **fields)
    assert said["calls"] == [[call.function.name, call.function.arguments]]
    for name, arguments in allowed.items():
        named: Any = {"type": "function", "function": {"name": name}}
        [choice] = same_in_both(
            name, create(client, "hello", tools=tools, tool_choice=named, max_tokens=300, seed=5)
        ).choices
        assert [call.function.name for call in choice.message.tool_calls] == [name]
        assert json.loads(choice.message.tool_calls[0].function.arguments) in arguments


def test_strict_tools_leave_the_choice_and_bind_the_call(client: openai.OpenAI) -> None:
    tools = [forced_tool(strict=True), TOOLS[1]]
    [free] = same_in_both("free", create(client, "hello", tools=tools)).choices
    assert (free.message.content, free.finish_reason) == (SCRIPTS["hello"], "stop")
    [bound] = same_in_both("bound", create(client, "call", tools=tools, max_tokens=300, seed=5)).choices
    assert bound.message.reasoning_content == "I need both."
    assert json.loads(bound.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    message = create(client, "call", tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
    answer = create(client, messages=[*ASKED, message.model_dump(), *results], tools=TOOLS)
    assert answer.choices[0].message.content == SCRIPTS["hello"]


def test_marks_that_are_special_tokens_are_seen(nodes: list[Node], model: tuple[Path, Any]) -> None:
    with (
        serve(model[0], nodes, tool_call_parser="mistral", reasoning_parser="none") as router,
        openai_client(router.wait_ready()) as client,
    ):
        [call] = create(client, "mistral", tools=TOOLS).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
        assert len(call.id) == 9  # Mistral's own template takes no others
        said, _ = streamed(client, script="mistral", tools=TOOLS)
        assert said["calls"] == [["get_weather", call.function.arguments]]
        assert create(client, "think").choices[0].message.content == SCRIPTS["think"]
