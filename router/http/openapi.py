"""/openapi.json, made of the very structures that bodies are checked against."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.engine.process.version import version
from tandem.router.chat.chat_body import ChatBody, ChatTokenizeBody
from tandem.router.responses.body import ResponsesBody
from tandem.router.text.body_reader import REFUSED
from tandem.router.text.openai_api import CompletionBody, DetokenizeBody, TokenizeBody

_REFERENCE = "#/components/schemas/{name}"


class ErrorObject(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorObject


def description(is_strict: bool) -> dict[str, Any]:
    """OpenAPI 3.1. Fields that are refused with a reason are shown as taking null alone."""
    kinds = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, ChatTokenizeBody, DetokenizeBody, ErrorAnswer)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    _show_prompts(schemas)
    for kind in kinds[:-1]:
        _show_other_fields(schemas[kind.__name__], is_strict)
    paths = {
        "/v1/completions": _post("Complete prompts", CompletionBody, streams=True),
        "/v1/chat/completions": _post("Answer a conversation", ChatBody, streams=True),
        "/v1/responses": _post("Answer items of a conversation", ResponsesBody, streams=True),
        "/tokenize": _post("Token ids of a text, or of a conversation", TokenizeBody, ChatTokenizeBody),
        "/detokenize": _post("Text of token ids", DetokenizeBody),
        "/explain": _post("What each node would cost for a completion now", CompletionBody),
        "/v1/models": _get("The served model, as a list"),
        "/v1/models/{model_id}": _get("The served model", [_parameter("model_id")]),
        "/health": _get("Whether the router lives"),
        "/ping": _get("The same, by another name"),
        "/ready": _get("Whether requests can be served"),
        "/version": _get("Tandem's version"),
        "/metrics": _get("Prometheus metrics", kind="text/plain"),
        "/openapi.json": _get("This description"),
    }
    components = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": "Tandem", "version": version()}
    return {"openapi": "3.1.0", "info": info, "security": [{}, {"key": []}], "paths": paths, "components": components}


def _show_prompts(schemas: dict[str, Any]) -> None:
    """What the decoder leaves to a second look."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    lists = [{"type": "array", "items": one, "minItems": 1} for one in (text, ids)]
    schemas["CompletionBody"]["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}


def _show_other_fields(schema: dict[str, Any], is_strict: bool) -> None:
    """What becomes of fields that the structure lacks."""
    if not is_strict:
        del schema["additionalProperties"]
    for field, why in REFUSED.items():
        schema["properties"].setdefault(field, {"type": "null", "description": f"Not supported: {why}."})


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _get(
    summary: str, parameters: list[dict[str, Any]] | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    answers = {"200": {"description": "it is so", "content": {kind: {}}}, "default": _error()}
    return {"get": {"summary": summary, "responses": answers} | ({"parameters": parameters} if parameters else {})}


def _post(summary: str, *bodies: type, streams: bool = False) -> dict[str, Any]:
    references = [{"$ref": _REFERENCE.format(name=body.__name__)} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    content: dict[str, Any] = {"application/json": {}}
    if streams:
        content["text/event-stream"] = {}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "the answer", "content": content}, "default": _error()},
        }
    }


def _error() -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(name=ErrorAnswer.__name__)}
    return {"description": "an error, in OpenAI's shape", "content": {"application/json": {"schema": schema}}}
