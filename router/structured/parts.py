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

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names of one's own -> schema


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
    try:
        why = _not_followed(schema)
    except RecursionError:
        why = "it is too deep"
    if why:
        _bad(param, f"{param} can't be followed: {why}")
    return schema


def _not_followed(schema: Any) -> str:
    """What of a schema llguidance takes, and would write output for that isn't valid; "" when nothing is."""
    if isinstance(schema, list):
        return next(filter(None, map(_not_followed, schema)), "")
    if not isinstance(schema, dict):
        return ""
    least, named = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least >= 2 + len(named if isinstance(named, list) else ()):
        return f"minProperties {least} asks for members that nothing names, and one name might be written twice"
    for name, value in schema.items():
        if name in ("const", "enum"):
            if _has_long_number(value):
                return f"{name} holds a number of more digits than are kept, beyond 2^53"
        elif why := _not_followed(list(value.values()) if name in MAPS and isinstance(value, dict) else value):
            return why
    return ""


def _has_long_number(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_long_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > 1 << 53


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
