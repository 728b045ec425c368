"""Parts of grammars: JSON schemas and Lark, as llguidance reads them. Pure.

A grammar is a list of parts, which name each other by `@name`. It starts with the first.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.text.openai_api import StructuredOutputs

Part = dict[str, Any]

# The white space between the tokens of JSON: a space, or a line break and what indents the next line. Models that may
# write any white space sometimes write nothing else.
WHITE_SPACE = r"[ ]|\r?\n[ \t]{0,64}"


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


def as_lark(grammar: str, param: str) -> str:
    """The grammar in Lark: as it is, or translated from GBNF (`root ::= …`). Raises InvalidRequestError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the translator is a parser with errors of many kinds
        _bad(param, f"{param} is neither Lark nor GBNF: {str(error)[:200]}")


def schema_of(schema: Any, param: str, place: str) -> Any:
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
