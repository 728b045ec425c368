"""What a body holds the text of its answer to, as a part of a grammar. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.structured.parts import Part, as_lark, lark_part, schema_of, schema_part
from tandem.router.structured.spelling import Spelling, in_slashes, quoted
from tandem.router.structured.structural_tag import structural_tag_part
from tandem.router.text.openai_api import GenerationBody, StructuredOutputs

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What an answer is held to, and the field (`param`) that asks for it."""

    param: str
    part: Part


def answer_of(body: GenerationBody, spelling: Spelling) -> AnswerPart | None:
    """What a body holds its answer to; None: nothing. `spelling` knows all marks of the model's tokenizer. Raises
    InvalidRequestError for what isn't well formed, and when two fields ask."""
    found = [
        *_response_format(body.response_format, spelling),
        *_structured(body.structured_outputs, spelling),
        *_guided(body),
    ]
    if len(found) > 1:
        _bad(found[1].param, f"{found[0].param} and {found[1].param} both say what the answer must be; give one")
    return found[0] if found else None


def _response_format(asked: dict[str, Any] | None, spelling: Spelling) -> Iterator[AnswerPart]:
    kind = "text" if asked is None else asked.get("type")
    if kind == "json_object":
        yield AnswerPart("response_format", schema_part({"type": "object"}))
    elif kind == "json_schema":
        assert asked is not None
        given = asked.get("json_schema")
        schema = given.get("schema", {"type": "object"}) if isinstance(given, dict) else None
        yield AnswerPart("response_format", schema_part(schema_of(schema, "response_format", ".json_schema.schema")))
    elif kind == "structural_tag":
        yield AnswerPart("response_format", structural_tag_part(asked, spelling, "response_format"))
    elif kind != "text":
        kinds = ", ".join(RESPONSE_FORMATS)
        _bad("response_format", f"response_format.type is {str(kind)[:64]!r}; it may be {kinds}")


def _structured(asked: StructuredOutputs | None, spelling: Spelling) -> Iterator[AnswerPart]:
    if asked is None:
        return
    param = "structured_outputs"
    parts: list[Part] = []
    if asked.json is not None:
        parts.append(schema_part(schema_of(asked.json, param, ".json"), asked))
    if asked.json_object:
        parts.append(schema_part({"type": "object"}, asked))
    parts += _texts(param, asked.regex, asked.choice, asked.grammar)
    if asked.structural_tag is not None:
        parts.append(structural_tag_part(asked.structural_tag, spelling, param))
    if len(parts) != 1:
        kinds = "json, json_object, regex, choice, grammar, structural_tag"
        _bad(param, f"structured_outputs must have one of {kinds}, not {len(parts)}")
    yield AnswerPart(param, parts[0])


def _guided(body: GenerationBody) -> Iterator[AnswerPart]:
    """What the older fields, guided_json and others, ask for."""
    settings = StructuredOutputs(whitespace_pattern=body.guided_whitespace_pattern)
    if body.guided_json is not None:
        yield AnswerPart("guided_json", schema_part(schema_of(body.guided_json, "guided_json", ""), settings))
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
        yield lark_part(as_lark(grammar, param))


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
