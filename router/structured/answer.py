"""What a body holds the text of its answer to, as a part of a grammar. Pure.

A grammar is a list of parts (llguidance's form), each a JSON schema or Lark, which name each other by `@name`. It
starts with the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.text.openai_api import GenerationBody, StructuredOutputs

Part = dict[str, Any]

# The white space between the tokens of JSON: a space, or a line break and what indents the next line. Models that may
# write any white space sometimes write nothing else.
WHITE_SPACE = r"[ ]|\r?\n[ \t]{0,64}"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What an answer is held to, and the field (`param`) that asks for it."""

    param: str
    part: Part


def answer_of(body: GenerationBody) -> AnswerPart | None:
    """What a body holds its answer to; None: nothing. Raises InvalidRequestError for what isn't well formed, and when
    two fields ask."""
    found = [*_response_format(body.response_format), *_structured(body.structured_outputs), *_guided(body)]
    if len(found) > 1:
        _bad(found[1].param, f"{found[0].param} and {found[1].param} both say what the answer must be; give one")
    return found[0] if found else None


def schema_part(schema: Any, settings: StructuredOutputs | None = None) -> Part:
    """A part that is a JSON schema. `settings` say which white space and which further members are allowed."""
    guidance: dict[str, Any] = {"whitespace_flexible": False}
    if settings is None or not settings.disable_any_whitespace:
        pattern = None if settings is None else settings.whitespace_pattern
        guidance = {"whitespace_flexible": True, "whitespace_pattern": pattern or WHITE_SPACE}
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"enum": []}
    if settings is not None and settings.disable_additional_properties:
        schema = _closed(schema)
    return {"json_schema": {**schema, "x-guidance": guidance}}


def lark_part(lark: str) -> Part:
    return {"lark_grammar": lark}


def quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def in_slashes(regex: str) -> str:
    """A regular expression of Lark: slashes and line breaks inside are escaped."""
    parts, is_escaped = [], False
    for char in regex:
        parts.append({"/": "/" if is_escaped else "\\/", "\n": "n" if is_escaped else "\\n"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(parts)}/"


def _response_format(asked: dict[str, Any] | None) -> Iterator[AnswerPart]:
    kind = "text" if asked is None else asked.get("type")
    if kind == "json_object":
        yield AnswerPart("response_format", schema_part({"type": "object"}))
    elif kind == "json_schema":
        assert asked is not None
        given = asked.get("json_schema")
        schema = given.get("schema", {"type": "object"}) if isinstance(given, dict) else None
        yield AnswerPart("response_format", schema_part(_schema(schema, "response_format", ".json_schema.schema")))
    elif kind != "text":
        _bad("response_format", f"response_format.type is {str(kind)[:64]!r}; it may be text, json_object, json_schema")


def _structured(asked: StructuredOutputs | None) -> Iterator[AnswerPart]:
    if asked is None:
        return
    param = "structured_outputs"
    if asked.structural_tag is not None:
        _bad(param, "structured_outputs.structural_tag isn't built; use tools with tool_choice, or a grammar")
    parts: list[Part] = []
    if asked.json is not None:
        parts.append(schema_part(_schema(asked.json, param, ".json"), asked))
    if asked.json_object:
        parts.append(schema_part({"type": "object"}, asked))
    parts += _texts(param, asked.regex, asked.choice, asked.grammar)
    if len(parts) != 1:
        _bad(param, f"structured_outputs must have one of json, json_object, regex, choice, grammar, not {len(parts)}")
    yield AnswerPart(param, parts[0])


def _guided(body: GenerationBody) -> Iterator[AnswerPart]:
    """What the older fields, guided_json and others, ask for."""
    settings = StructuredOutputs(whitespace_pattern=body.guided_whitespace_pattern)
    if body.guided_json is not None:
        yield AnswerPart("guided_json", schema_part(_schema(body.guided_json, "guided_json", ""), settings))
    for param, texts in (
        ("guided_regex", (body.guided_regex, None, None)),
        ("guided_choice", (None, body.guided_choice, None)),
        ("guided_grammar", (None, None, body.guided_grammar)),
    ):
        for part in _texts(param, *texts):
            yield AnswerPart(param, part)


def _texts(param: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> Iterator[Part]:
    if regex is not None:
        yield lark_part(f"start: {in_slashes(regex)}")
    if choice is not None:
        yield lark_part(f"start: {' | '.join(map(quoted, choice))}")
    if grammar is not None:
        yield lark_part(_as_lark(grammar, param))


def _as_lark(grammar: str, param: str) -> str:
    """The grammar in Lark: as it is, or translated from GBNF (`root ::= …`). Raises InvalidRequestError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the translator is a parser with errors of many kinds
        _bad(param, f"{param} is neither Lark nor GBNF: {str(error)[:200]}")


def _schema(schema: Any, param: str, place: str) -> Any:
    """A JSON schema as it was parsed, or as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            _bad(param, f"{param}{place} is no JSON: {error}")
    if not isinstance(schema, dict | bool):
        _bad(param, f"{param}{place} must be a JSON schema: an object")
    return schema


def _closed(schema: Any) -> Any:
    """The schema with objects closed: they may have only the members that it names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if "properties" in schema or schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
