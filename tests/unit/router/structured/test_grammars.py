"""What bodies ask for as grammars: random walks through them are what was asked for, and the parsers read them."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat import thinking
from tandem.router.chat.deltas import ChatMessage
from tandem.router.chat.parsers import CALL_PARSERS, HARMONY, Parsers
from tandem.router.structured.answer import answer_of
from tandem.router.structured.calls import ChatGrammar, Thinking, Tool
from tandem.router.structured.parts import Part, schema_of
from tandem.router.structured.spelling import Spelling
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.openai_api import CompletionBody, GenerationBody
from tandem.router.text.tokenizer import Tokenizer as RouterTokenizer

EOS = "</s>"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "when": {"$ref": "#/$defs/day"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
}
TOOLS = [Tool("get_weather", WEATHER), Tool("get-time", None)]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
MARKS = sorted({mark for parser in CALL_PARSERS.values() for mark in parser.markers} | {thinking.BEGIN, thinking.END})


KINDS = ["texts", "added", "special"]  # what marks are to the tokenizer


@cache
def tokenizer(marks: str) -> tuple[Tokenizer, LLTokenizer]:
    """Of single bytes, and of the marks where they are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    if marks != "texts":
        made.add_tokens([AddedToken(mark, special=marks == "special", normalized=False) for mark in MARKS])
    return made, LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=made.token_to_id(EOS))


@cache
def spelling(marks: str) -> Spelling:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer(marks)[0].save(f"{folder}/tokenizer.json")
        found = RouterTokenizer(folder).mark_ids
    named = {mark for mark in MARKS if marks == "special" or (marks == "added" and mark.startswith("<"))}
    assert found.keys() == named | {EOS}
    assert all(tokenizer(marks)[1].is_special_token(token_id) for token_id in found.values())
    return Spelling(found)


def matcher_of(parts: list[Part], marks: str = "texts") -> LLMatcher:
    matcher = LLMatcher(tokenizer(marks)[1], msgspec.json.encode({"grammars": parts}).decode(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(parts: list[Part], seed: int, marks: str = "texts", most: int = 900, hurries: bool = True) -> str:
    """A random output; after a while it takes a way out where there is one. It may be cut at `most` tokens."""
    made, _ = tokenizer(marks)
    matcher, rng = matcher_of(parts, marks), random.Random(seed)
    mask, output = allocate_token_bitmask(1, made.get_vocab_size()), []
    preferred = [*spelling(marks).marks.values(), *made.encode('"}]').ids]
    while not matcher.is_stopped() and len(output) < most:
        fill_next_token_bitmask(matcher, mask, 0)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        ways_out = [token for token in [made.token_to_id(EOS), *preferred] if token in allowed]
        token = ways_out[0] if hurries and ways_out and rng.random() < 0.3 else rng.choice(allowed)
        assert matcher.consume_token(token)
        output.append(token)
    ids = [token for token in output if token != made.token_to_id(EOS)]
    return made.decode(ids, skip_special_tokens=False)


def accepts(parts: list[Part], text: str, marks: str = "texts") -> bool:
    """Whether the whole text is one that may end there."""
    matcher = matcher_of(parts, marks)
    ids = tokenizer(marks)[0].encode(text).ids
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def body(**fields: Any) -> CompletionBody:
    raw = json.dumps({"prompt": "x", **fields}).encode()
    return BodyReader().read(CompletionBody, raw)


def part(**fields: Any) -> list[Part]:
    asked = answer_of(body(**fields), spelling("texts"))
    assert asked is not None
    return [asked.part]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": schema}}


ASKED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}},
     ['{"a": [1, {}]}', "{}", '{\n  "a": 1\n}'], ["[]", "1", '{"a":  1}']),
    ({"response_format": schema_format(POINT)}, ['{"x": 3}', '{"x":3}'], ['{"x": "3"}', "{}", '{"x": 3, "y": 1}']),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ['{"x": 3}'], ["3"]),
    ({"structured_outputs": {"json": POINT}}, ['{"x": 3}'], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x": 3}'], ["{}"]),
    ({"structured_outputs": {"json": True}}, ["3", '"a"'], ["x"]),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
    ({"structured_outputs": {"json": {"properties": {"a": {}}}, "disable_additional_properties": True}},
     ['{"a": 1}', "{}"], ['{"b": 1}']),
    ({"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": "_"}}, ["[1,_2]"], ["[1, 2]"]),
    ({"structured_outputs": {"regex": r"a/b\/c|\d{2}"}}, ["a/b/c", "12"], ["a/b", "1"]),
    ({"structured_outputs": {"choice": ['a "b"\n', "é😀", "a\\n"]}}, ['a "b"\n', "é😀", "a\\n"], ["a", "é", "a\n"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, ["b", "aab"], ["a", "ba"]),
    ({"structured_outputs": {"grammar": 'start: "a" | "b" start'}}, ["a", "bba"], ["b"]),
    ({"guided_json": POINT}, ['{"x": 3}'], ["{}"]),
    ({"guided_json": {"type": "array"}, "guided_whitespace_pattern": "_"}, ["[1,_2]"], ["[1, 2]"]),
    ({"guided_regex": "[ab]+"}, ["abba"], ["c"]),
    ({"guided_choice": ["yes", "no"]}, ["yes", "no"], ["maybe"]),
    ({"guided_grammar": 'root ::= "x" | "y"'}, ["x"], ["z"]),
    ({"response_format": {"type": "structural_tag", "triggers": ["<function=", "<f2"], "structures": [
        {"begin": "<function=at>", "schema": POINT, "end": "</function>"}, {"begin": "<f2>", "schema": {}, "end": ""}],
    }},
     ["none", "so: <function=at>{\"x\": 3}</function> and <f2>[1] <function", ""],
     ['<function=at>{"x": "3"}</function>', "<function=other>", 'a <function=at>{"x": 3}', "<f2", "<function= <f2>1"]),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "</t>"]},
        {"type": "or", "elements": [{"type": "regex", "pattern": "a/b{2}"}, {"type": "const_string", "value": "c\n"}]},
        {"type": "grammar", "grammar": 'root ::= "x" | "y" root'}, {"type": "any_text"}]}})}},
     ["<think>so {</think>a/bbyyx and on", "<think></t>c\nx"], ["a/bbx", "<think></think>a/bbz", "<think>a/bbx"]),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [
        {"begin": "<a>", "content": {"type": "const_string", "value": "1"}, "end": ">"}], "at_least_one": True}}}},
     ["<a>1>", "b<a>1><a>1>c"], ["", "b", "<a>1>b<a"]),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [
        {"begin": "<a>", "content": {"type": "const_string", "value": "1"}, "end": ""}], "stop_after_first": True}}}},
     ["<a>1", "b<a>1", "b"], ["<a>1c", "<a>1<a>1"]),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "tags_with_separator", "separator": ", ", "tags": [
        {"type": "tag", "begin": x, "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": ";"}
        for x in "ab"]}}}}, ["", "a1;", "a1;, b2;, a3;"], ["a1;b2;", "a1;, ", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "good", "bad"), ASKED, ids=lambda value: str(value)[:60])
def test_an_answer_is_what_was_asked_for(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(part(**fields), text), text
    for text in bad:
        assert not accepts(part(**fields), text), text


def tagged(tag_format: Any) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": tag_format}}


@pytest.mark.parametrize("marks", KINDS)
def test_tags_may_begin_and_end_with_marks(marks: str) -> None:
    """Which the model writes as the tokens that they are."""
    call = {"begin": "<tool_call>\n", "content": {"type": "json_schema", "json_schema": POINT}, "end": "\n</tool_call>"}
    calls = {"type": "triggered_tags", "triggers": ["<tool_call>\n"], "tags": [call]}
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    asked = body(structured_outputs=tagged({"type": "sequence", "elements": [thought, calls]}))
    answer = answer_of(asked, spelling(marks))
    assert answer is not None
    good = '<think>a call?</think>so\n<tool_call>\n{"x": 1}\n</tool_call><tool_call>\n{"x":2}\n</tool_call>.'
    assert accepts([answer.part], good, marks)
    for wrong in (good.replace("2", '"2"'), good.replace("</think>", ""), good.removesuffix("</tool_call>.")):
        assert not accepts([answer.part], wrong, marks)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
    ({"response_format": schema_format([1])}, "response_format", "must be a JSON schema"),
    ({"structured_outputs": {}}, "structured_outputs", "not 0"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "has `format`, or `structures`"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "no JSON"),
    ({"structured_outputs": tagged({"type": "qwen_xml"})}, "structured_outputs", "'qwen_xml'; it may be const_string"),
    ({"structured_outputs": tagged(3)}, "structured_outputs", "'None'"),
    ({"structured_outputs": tagged({"type": "tag", "begin": 3})}, "structured_outputs", "`begin` must be a text"),
    ({"structured_outputs": tagged({"type": "or", "elements": []})}, "structured_outputs", "`elements` must be a list"),
    ({"structured_outputs": tagged({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]})},
     "structured_outputs", "nobody knows where it ends"),
    ({"structured_outputs": tagged({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "b", "end": ""}]})},
     "structured_outputs", "none of the triggers"),
    ({"structured_outputs": tagged(functools.reduce(lambda f, _: {"type": "or", "elements": [f]}, range(40), {}))},
     "structured_outputs", "deep"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}}, "response_format", "`tags`"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs", "must be a JSON schema"),
    ({"guided_json": {"properties": {"const": {"enum": [[{"a": 1 << 60}]]}}}}, "guided_json", "enum holds a number"),
    ({"guided_json": {"anyOf": [{"minProperties": 3, "required": ["a"]}]}}, "guided_json", "might be written twice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", ">= 1"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "regex"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "neither Lark nor GBNF"),
    ({"guided_json": POINT, "response_format": {"type": "json_object"}}, "guided_json", "give one"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_well_formed_names_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        answer_of(body(**fields), spelling("texts"))
    assert caught.value.param == param
    assert says in caught.value.message


def test_a_schema_that_is_too_deep_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="too deep"):
        schema_of(functools.reduce(lambda inner, _: {"not": inner}, range(5000), {}), "guided_json", "")


def test_a_body_that_asks_for_nothing_is_free() -> None:
    assert answer_of(body(response_format={"type": "text"}, guided_json=None), spelling("texts")) is None


# --- calls ----------------------------------------------------------------------------------------------------

FORMS = [(name, template) for name in CALL_PARSERS for template in ("", "```json")[: 1 + (name == "deepseek_v3")]]
SPELLED = [  # harmony's marks are tokens wherever it is spoken
    (*form, marks) for form in FORMS for marks in KINDS if (form[0], marks) != (HARMONY, "texts")
]


def grammar_of(parser: str, template: str = "", marks: str = "texts", **fields: Any) -> list[Part]:
    spelled = spelling(marks)
    one_call = fields.pop("one_call", False) or parser == HARMONY
    opening = fields.pop("opening", "no")
    fields = {"answer": None, "tools": TOOLS, "form": CALL_PARSERS[parser].form(template, spelled.marks), **fields}
    grammar = ChatGrammar(spelled, one_call=one_call, **fields)
    assert not grammar.is_free
    if parser == HARMONY:
        return grammar.channel_parts()
    return grammar.parts(Thinking(thinking.BEGIN, thinking.END, opening))


def read(parser: str, text: str, reasoning: str = "none", prompt: str = "") -> ChatMessage:
    machine = Parsers(parser, reasoning).make({tool.name for tool in TOOLS}, prompt)
    message = ChatMessage()
    message.add(machine.feed(text) + machine.finish())
    return message


@pytest.mark.parametrize(("parser", "template", "marks"), SPELLED)
def test_forced_calls_are_what_the_parser_reads(parser: str, template: str, marks: str) -> None:
    parts = grammar_of(parser, template, marks, must_call=True)
    counts = set()
    for seed in range(6):
        text = walk(parts, seed, marks)
        message = read(parser, text, "openai" if parser == HARMONY else "none")
        assert message.calls, text
        assert not message.content.strip()
        counts.add(len(message.calls))
        for call in message.calls[: -1 if len(text) > 800 else None]:
            arguments = json.loads(call.arguments)
            assert call.name in {tool.name for tool in TOOLS}
            assert call.name != "get_weather" or (set(arguments) <= {"city", "when"} and arguments["city"])
    assert parser == HARMONY or len(counts) > 1


@pytest.mark.parametrize(("parser", "template"), FORMS)
def test_one_call_is_one(parser: str, template: str) -> None:
    parts = grammar_of(parser, template, "special", must_call=True, one_call=True, tools=TOOLS[:1])
    for seed in range(3):
        calls = read(parser, walk(parts, seed, "special"), "openai" if parser == HARMONY else "none").calls
        assert calls is not None
        assert [call.name for call in calls] == ["get_weather"]
        assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(("parser", "template", "marks"), SPELLED)
def test_strict_tools_bind_the_calls_that_a_text_holds(parser: str, template: str, marks: str) -> None:
    strict = [Tool("get_weather", WEATHER, strict=True), TOOLS[1]]
    parts = grammar_of(parser, template, marks, tools=strict)
    forced = walk(grammar_of(parser, template, marks, tools=strict[:1], must_call=True, one_call=True), 1,
                  marks)  # fmt: skip
    plain = "<|channel|>final<|message|>Hello, {you} there" if parser == HARMONY else "Hello, {you} there"
    assert accepts(parts, plain, marks)
    assert accepts(parts, forced, marks)
    wrong = forced.replace("Rome", "Bonn").replace("Oslo", "Bonn")
    assert wrong != forced
    assert not accepts(parts, wrong, marks)
    assert not accepts(parts, forced.replace("get_weather", "get_whether"), marks)


def test_nothing_is_held_to_anything_without_a_reason() -> None:
    assert ChatGrammar(spelling("texts"), None, TOOLS, None).is_free
    assert ChatGrammar(spelling("texts"), None, None, None).is_free


@pytest.mark.parametrize("parser", CALL_PARSERS)
def test_an_answer_beside_tools_is_a_call_or_what_was_asked_for(parser: str) -> None:
    answer = answer_of(GenerationBody(response_format=schema_format(POINT)), spelling("texts"))
    fields: dict[str, Any] = {"answer": answer, "tools": TOOLS}
    form = CALL_PARSERS[parser].form("", {})
    assert ChatGrammar(spelling("texts"), form=form, **fields).excludes_itself == (parser == "llama3_json")
    if parser in ("llama3_json", HARMONY):
        return
    parts = grammar_of(parser, **fields)
    assert accepts(parts, '{"x": 1}')
    assert accepts(parts, walk(grammar_of(parser, must_call=True, one_call=True), 1))
    assert not accepts(parts, "Hello")


@pytest.mark.parametrize("marks", KINDS)
def test_reasoning_comes_before_the_grammar(marks: str) -> None:
    answer = answer_of(GenerationBody(response_format=schema_format(POINT)), spelling("texts"))

    def parts(opening: str) -> list[Part]:
        return grammar_of("hermes", marks=marks, tools=None, answer=answer, opening=opening)

    thought, said = '<think>\n{"x": 2} or </thin?\n</think>\n\n', '{"x": 1}'
    for opening, good, bad in (
        ("no", [said], [thought + said]),
        ("maybe", [said, thought + said], [thought, "Well: " + said]),
        ("open", [thought + said, "Well.</think>" + said], [said, thought]),
    ):
        for text in good:
            assert accepts(parts(opening), text, marks), (opening, text)
        for text in bad:
            assert not accepts(parts(opening), text, marks), (opening, text)
    for seed in range(0 if marks == "texts" else 4):  # nobody spells a mark by chance
        message = read("none", walk(parts("maybe"), seed, marks), "qwen3")
        assert list(json.loads(message.content)) == ["x"]


def test_channels_hold_reasoning_and_the_answer() -> None:
    answer = answer_of(GenerationBody(response_format=schema_format(POINT)), spelling("texts"))
    parts = grammar_of(HARMONY, marks="special", tools=None, answer=answer)
    note, final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", '<|channel|>final<|message|>{"x": 1}'
    assert accepts(parts, note + final, "special")
    assert accepts(parts, final, "special")
    assert not accepts(parts, note, "special")
    assert not accepts(parts, '<|channel|>final<|message|>{"y": 1}', "special")


def test_where_reasoning_begins_is_read_off_the_prompt() -> None:
    for reasoning, prompt, opening in (
        ("qwen3", "user\n", "maybe"), ("qwen3", "<think>\n", "open"), ("qwen3", "<think>\n\n</think>\n\n", "no"),
        ("deepseek_r1", "user", "open"), ("deepseek_r1", "</think>", "no"), ("none", "<think>", "no"),
    ):  # fmt: skip
        assert Parsers("none", reasoning).opening(prompt) == opening
