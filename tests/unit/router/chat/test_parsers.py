"""Parsers of output: what they read, that cuts change nothing, and that no text is lost or makes them raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.errors import ConfigError
from tandem.router.chat.deltas import (
    Call,
    CallArguments,
    CallStart,
    ChatMessage,
    Content,
    OutputParser,
    Reasoning,
    merged,
)
from tandem.router.chat.parsers import AUTO, CALL_PARSERS, NONE, Parsers, choose_parsers
from tandem.router.chat.thinking import BEGIN as THINK

NAMES = frozenset({"get_weather", "f"})
ARGUMENTS = '{"city": "São \\"P\\" {[", "days": [1, {"x": null}]}'
F, WEATHER = Call("f", "{}"), Call("get_weather", ARGUMENTS)
TWO = [WEATHER, F]
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
SHORT = '{"name": "f", "arguments": {}}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FIRST = "<|channel|>commentary<|message|>First.<|end|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"

# parser of calls, parser of reasoning, end of the prompt, output, what it is
READ = [
    ("hermes", NONE, "", "Just words \n", ChatMessage("Just words \n")),
    (
        "hermes",
        NONE,
        "",
        f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{SHORT}</tool_call>\n",
        ChatMessage("Sure.", calls=TWO),
    ),
    ("hermes", NONE, "", f"<tool_call>{CALL}</tool_call> and then", ChatMessage(" and then", calls=[WEATHER])),
    (
        "hermes",
        NONE,
        "",
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "get_weather"}}</tool_call>',
        ChatMessage(calls=[WEATHER]),
    ),
    ("hermes", NONE, "", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', ChatMessage(calls=[F])),
    ("hermes", NONE, "", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ChatMessage(calls=[F])),
    ("hermes", NONE, "", '<tool_call>{"name": "f"}</tool_call>', ChatMessage(calls=[F])),
    ("hermes", NONE, "", '<tool_call>{"name": "f", "arguments": {"a": 1', ChatMessage(calls=[Call("f", '{"a": 1')])),
    ("llama3_json", NONE, "", CALL.replace("arguments", "parameters"), ChatMessage(calls=[WEATHER])),
    ("llama3_json", NONE, "", f'<|python_tag|>{{"type": "function", {CALL[1:]}; {SHORT}', ChatMessage(calls=TWO)),
    ("llama3_json", NONE, "", '{"name": "Bob", "age": 3}', ChatMessage('{"name": "Bob", "age": 3}')),
    ("llama3_json", NONE, "", ' {"answer": [1]}\n', ChatMessage(' {"answer": [1]}\n')),
    ("mistral", NONE, "", f"Hi [TOOL_CALLS] [{CALL}, {SHORT}]", ChatMessage("Hi", calls=TWO)),
    (
        "mistral",
        NONE,
        "",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]f[CALL_ID]a1[ARGS]{{}}",
        ChatMessage(calls=TWO),
    ),
    ("mistral", NONE, "", f"[TOOL_CALLS]get_weather{ARGUMENTS}", ChatMessage(calls=[WEATHER])),
    (
        "deepseek_v3",
        NONE,
        "",
        "So" + DEEPSEEK.format(V3.format("get_weather", ARGUMENTS) + "\n" + V3.format("f", "{}")),
        ChatMessage("So", calls=TWO),
    ),
    (
        "deepseek_v3",
        NONE,
        "",
        DEEPSEEK.format(V31.format("get_weather", ARGUMENTS) + V31.format("f", "{}")),
        ChatMessage(calls=TWO),
    ),
    ("openai", "openai", "", f"{ANALYSIS}{FINAL}Yes.", ChatMessage("Yes.", "Hm.")),
    ("openai", "openai", "", f"{ANALYSIS}<|start|>assistant{TO_F}", ChatMessage("", "Hm.", [F])),
    (
        "openai",
        "openai",
        "",
        f"{FIRST}<|start|>assistant to=functions.f<|channel|>commentary<|message|>{{}}<|call|>",
        ChatMessage("First.", calls=[F]),
    ),
    ("openai", NONE, "", f"{ANALYSIS}{FINAL}Yes.", ChatMessage("Hm.Yes.")),
    (NONE, "openai", "", "<|start|>assistant" + TO_F, ChatMessage("", "{}")),
    ("openai", "openai", "", "plain words", ChatMessage("plain words")),
    (NONE, "qwen3", "", "<think>\nHm.\n</think>\n\nYes.", ChatMessage("Yes.", "Hm.")),
    (NONE, "qwen3", "<think>\n", "Hm.\n</think>\n\nYes.", ChatMessage("Yes.", "Hm.")),
    (NONE, "qwen3", "<think>\n\n</think>\n\n", "Yes.", ChatMessage("Yes.")),
    (NONE, "qwen3", "", " Yes <think>", ChatMessage(" Yes <think>")),
    (NONE, "qwen3", "", "<think>Hm, </thi", ChatMessage("", "Hm, </thi")),
    (NONE, "deepseek_r1", "", "Hm.</think>Yes.", ChatMessage("Yes.", "Hm.")),
    (NONE, "deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", ChatMessage("Yes.")),
    (
        "hermes",
        "qwen3",
        "<think>",
        f"Hm. <tool_call></think> So\n<tool_call>{SHORT}</tool_call>",
        ChatMessage("So", "Hm. <tool_call>", [F]),
    ),
]
# No calls: content from the first character to the last.
MALFORMED = [
    ("hermes", "a <tool_call>\nnope</tool_call> b"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]'),
    ("hermes", '<tool_call>{"name": "f", '),
    ("hermes", '<tool_call>{"name": "f"] '),
    ("hermes", '<tool_call>{"weather": {"name": "f"}}'),
    ("hermes", "x <tool_"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>print("hello")'),
    ("mistral", "[TOOL_CALLS] what? [1]"),
    ("mistral", '[TOOL_CALLS][{"x": 1}]'),
    ("mistral", "[TOOL_CALLS]name[ARGS] no"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> hm"),
    ("deepseek_v3", DEEPSEEK.format("<｜tool▁call▁begin｜>function")),
    ("deepseek_v3", DEEPSEEK.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f")),
    ("deepseek_v3", DEEPSEEK.format(V3.format("f", "nothing"))),
]


def read(make: Callable[[], OutputParser], parts: Iterable[str]) -> ChatMessage:
    parser, message = make(), ChatMessage()
    for part in parts:
        message.add(parser.feed(part))
    message.add(parser.finish())
    return message


def parser_of(calls: str, reasoning: str, prompt: str = "") -> Callable[[], OutputParser]:
    return lambda: Parsers(calls, reasoning).make(NAMES, prompt)


@pytest.mark.parametrize(("calls", "reasoning", "prompt", "text", "message"), READ)
def test_what_is_read_wherever_it_is_cut(
    calls: str, reasoning: str, prompt: str, text: str, message: ChatMessage
) -> None:
    make = parser_of(calls, reasoning, prompt)
    assert read(make, [text]) == message
    assert read(make, text) == message
    assert all(read(make, [text[:i], text[i:]]) == message for i in range(len(text)))


@pytest.mark.parametrize(("calls", "text"), MALFORMED)
def test_what_is_malformed_is_content(calls: str, text: str) -> None:
    for parts in ([text], list(text)):
        assert read(parser_of(calls, NONE), parts) == ChatMessage(text)


def test_arguments_are_passed_on_as_they_come() -> None:
    parser, known = parser_of("hermes", NONE)(), ChatMessage()
    known.add(parser.feed('<tool_call>{"name": "f", "arguments": {"a": [1, '))
    assert known.calls == [Call("f", '{"a": [1, ')]
    known.add(parser.feed('"b\\'))
    assert known.calls == [Call("f", '{"a": [1, "b\\')]


def test_neighbours_that_continue_each_other_are_one() -> None:
    first, second = CallArguments(0, "{"), CallArguments(0, "}")
    deltas = [Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), CallStart(0, "f"), first, second]
    others = [CallStart(1, "g"), CallArguments(1, "{}")]
    assert merged([*deltas, *others]) == [
        Reasoning("ab"),
        Content("cd"),
        CallStart(0, "f"),
        CallArguments(0, "{}"),
        *others,
    ]
    assert merged([]) == []


MARKS = ["<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "a", "functions.f", "é"]
MARKS += ['"name"', '"f"', '"arguments"', '{"name": "f", "arguments": {', "<tool_call>", "</tool_call>", "```json\n"]
MARKS += [mark for parser in CALL_PARSERS.values() for mark in parser.markers]


@pytest.mark.parametrize("calls", [NONE, *CALL_PARSERS])
@settings(max_examples=20)
@given(st.data())
def test_any_text_cut_anywhere_reads_the_same(calls: str, data: st.DataObject) -> None:
    make = parser_of(calls, data.draw(st.sampled_from([NONE, "qwen3", "deepseek_r1", "openai"])))
    text = "".join(data.draw(st.lists(st.sampled_from(MARKS), max_size=20)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(make, [text])
    assert read(make, parts) == whole
    assert read(make, text) == whole
    said = [
        whole.content,
        whole.reasoning,
        *(part for call in whole.calls or [] for part in (call.name, call.arguments)),
    ]
    assert sum(map(len, said)) <= len(text) + 2 * len(whole.calls or []), "something was said that isn't there"


VALUES = st.none() | st.text(max_size=8) | st.lists(st.integers() | st.text(max_size=4), max_size=2)


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.booleans())
def test_any_arguments_come_through_every_parser(value: dict, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    call = f'{{"name": "f", "arguments": {text}}}'
    written = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama3_json": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "deepseek_v3": DEEPSEEK.format(V3.format("f", text)),
    }
    for calls, output in written.items():
        assert read(parser_of(calls, NONE), output).calls == [Call("f", text)]


def test_parsers_are_chosen_by_what_templates_write() -> None:
    qwen = "<tool_call> … </tool_call> <think>"
    assert choose_parsers(AUTO, AUTO, qwen) == Parsers("hermes", "qwen3")
    assert choose_parsers(AUTO, AUTO, "[TOOL_CALLS]") == Parsers("mistral", NONE)
    assert choose_parsers(AUTO, AUTO, "<|channel|>") == Parsers("openai", "openai")
    assert choose_parsers(AUTO, AUTO, "<think> <｜tool▁calls▁begin｜>") == Parsers("deepseek_v3", "qwen3")
    assert choose_parsers(AUTO, AUTO, '{"name": function name, "parameters": …}') == Parsers("llama3_json", NONE)
    assert choose_parsers(AUTO, AUTO, "") == Parsers(NONE, NONE)
    assert choose_parsers("llama3_json", "openai_gptoss", qwen) == Parsers("llama3_json", "openai")
    assert choose_parsers(NONE, NONE, qwen).markers == ()
    assert THINK in choose_parsers(AUTO, AUTO, qwen).markers
    with pytest.raises(ConfigError, match="--tool-call-parser xml: there are auto, none, hermes"):
        choose_parsers("xml", AUTO, "")
    with pytest.raises(ConfigError, match="--reasoning-parser xml"):
        choose_parsers(AUTO, "xml", "")
