"""/openapi.json, made of the very structures that bodies are checked against."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.process.version import version
from tandem.router.audio.body import TranscriptionBody
from tandem.router.chat.chat_body import ChatBody, ChatTokenizeBody
from tandem.router.chat.conversation import ROLES
from tandem.router.http.admin.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from tandem.router.http.admin.operate import DrainBody, RoleBody
from tandem.router.http.admin.profile import ProfileBody
from tandem.router.pooling.body import EmbeddingsBody, RerankBody, ScoreBody
from tandem.router.responses.body import ResponsesBody
from tandem.router.structured.answer import RESPONSE_FORMATS
from tandem.router.text.body_reader import REFUSED, SAYS_NOTHING, SWITCHES
from tandem.router.text.openai_api import LEAST_TIMEOUT_S, CompletionBody, DetokenizeBody, TokenizeBody

_REFERENCE = "#/components/schemas/{name}"
MAKE_TOKENS, POOL = (CompletionBody, ChatBody, ResponsesBody), (EmbeddingsBody, ScoreBody, RerankBody)
ADMIN = (LoadAdapterBody, UnloadAdapterBody, ProfileBody, DrainBody, RoleBody)
BODIES = (*MAKE_TOKENS, *POOL, *ADMIN, TranscriptionBody, TokenizeBody, ChatTokenizeBody, DetokenizeBody)
HEADERS = {
    "X-Request-Id": "comes back with the answer, and stands in the log",
    "X-Request-Timeout": "seconds until the request ends with 504, if that is sooner than the server's own limit",
    "X-Session-Id": "requests of one session go to the same nodes",
    "traceparent": "W3C Trace Context; its trace id stands in the log",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong: `message` for people, `type` its kind, `param` the field at fault, `code` the error's name."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorObject


def description(options: RouterOptions) -> dict[str, Any]:
    """The API in OpenAPI 3.1. Fields that are refused are shown with only the values that leave them unused."""
    _, schemas = msgspec.json.schema_components((*BODIES, ErrorAnswer), ref_template=_REFERENCE)
    _show_prompts(schemas)
    _show_file(schemas[TranscriptionBody.__name__])
    for kind in BODIES:
        _show_other_fields(schemas[kind.__name__], options.strict_requests)
    components = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": "Tandem", "version": version()}
    security: list[dict[str, list[str]]] = [{"key": []}] if options.api_key or options.api_keys_file else []
    return {"openapi": "3.1.0", "info": info, "security": security, "paths": _paths(options), "components": components}


def _paths(options: RouterOptions) -> dict[str, Any]:
    ping = "The same, by another name"
    paths = {
        "/v1/completions": _post("Complete prompts", CompletionBody, streams=True),
        "/v1/chat/completions": _post("Answer a conversation", ChatBody, streams=True),
        "/v1/responses": _post("Answer items of a conversation", ResponsesBody, streams=True),
        "/v1/embeddings": _post("Vectors of texts, of a model that embeds", EmbeddingsBody),
        **dict.fromkeys(("/score", "/v1/score"), _post("How well texts go together", ScoreBody)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _post("Documents by how well they fit", RerankBody)),
        "/v1/audio/transcriptions": _form("Text of a sound, in its language"),
        "/v1/audio/translations": _form("Text of a sound, in English"),
        "/v1/models": _get("The served model, as a list"),
        "/v1/models/{model_id}": _get("The served model", parameters=[_parameter("model_id", "path")]),
        "/tokenize": _post("Token ids of a text, or of a conversation", TokenizeBody, ChatTokenizeBody),
        "/detokenize": _post("Text of token ids", DetokenizeBody),
        "/v1/load_lora_adapter": _post("Serve a LoRA adapter by a name", LoadAdapterBody),
        "/v1/unload_lora_adapter": _post("Serve a LoRA adapter no longer", UnloadAdapterBody),
        **_operators_paths(),
        "/health": _get("Whether the router lives", is_open=True),
        "/ping": _get(ping, is_open=True) | {"post": _operation(ping, is_open=True)},
        "/ready": _get("Whether requests can be served", is_open=True),
        "/version": _get("Tandem's version", is_open=True),
        "/metrics": _get("Prometheus metrics", "text/plain", is_open=True),
        "/": _get("What this server is", is_open=True),
        "/docs": _get("This description, for people", "text/html", is_open=True),
        "/openapi.json": _get("This description", is_open=True),
    }
    if options.enable_tokenizer_info_endpoint:
        paths["/tokenizer_info"] = _get("Special tokens and chat template")
    return paths


def _operators_paths() -> dict[str, Any]:
    return {
        "/explain": _post("What each node would cost for a completion now", CompletionBody),
        "/profile/start": _post("Have every node profile its next steps", ProfileBody),
        "/profile/stop": {"post": _operation("End the nodes' profiles, and get their reports and traces")},
        "/status": _get("What the nodes have to do now, for operators"),
        "/admin/drain": _post("Have a node take nothing new, or take requests again", DrainBody),
        "/admin/role": _post("Give a node another role", RoleBody),
        "/admin/feed": {"get": _operation("What the dashboard shows, each second", "text/event-stream")},
        "/dashboard": _get("The dashboard, for people", "text/html", is_open=True),
        "/dashboard/{file}": _get(
            "A part of it", "text/javascript", is_open=True, parameters=[_parameter("file", "path")]
        ),
        "/admin/requests": _get("The newest requests, and what waits"),
        "/admin/requests/{name}": _get("The story of one request", parameters=[_parameter("name", "path")]),
    }


def _show_prompts(schemas: dict[str, Any]) -> None:
    """Adds the schemas of prompts and messages, and what else the decoder leaves to a second look."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    lists = [{"type": "array", "items": one, "minItems": 1} for one in (text, ids)]
    schemas["CompletionBody"]["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}
    schemas["EmbeddingsBody"]["properties"]["input"] = {"anyOf": [text, ids, *lists]}
    schemas["CompletionBody"]["properties"]["suffix"] = {"enum": [None, ""]}
    chat = schemas["ChatBody"]["properties"]
    chat["modalities"]["anyOf"][0]["items"] = {"const": "text"}
    message = {"type": "object", "required": ["role"], "properties": {"role": {"enum": list(ROLES)}}}
    for messages in (chat["messages"], schemas["ChatTokenizeBody"]["properties"]["messages"]):
        messages["items"] = message
    form = {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(RESPONSE_FORMATS)}}}
    bias = {"propertyNames": {"pattern": "^[0-9]+$"}}
    for kind in MAKE_TOKENS:
        fields = schemas[kind.__name__]["properties"]
        fields["response_format"]["anyOf"][0] = form
        fields["logit_bias"]["anyOf"][0] |= bias


def _show_file(form: dict[str, Any]) -> None:
    """Adds the field of a form that no structure has. In a schema of its own it would be one that the form's forbids,
    where it is strict."""
    form["properties"]["file"] = {"type": "string", "format": "binary"}
    form["required"] = [*form.get("required", ()), "file"]


def _show_other_fields(schema: dict[str, Any], is_strict: bool) -> None:
    """Shows what becomes of fields that the structure lacks."""
    if not is_strict:
        del schema["additionalProperties"]
    nothing = [msgspec.json.decode(value) for value in SAYS_NOTHING]
    for field, why in REFUSED.items():
        unused = [None] if field in SWITCHES else nothing
        schema["properties"].setdefault(field, {"enum": unused, "description": f"Not supported: {why}."})


def _parameter(name: str, place: str, text: str = "") -> dict[str, Any]:
    kind = {"type": "number", "minimum": LEAST_TIMEOUT_S} if name == "X-Request-Timeout" else {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "schema": kind, "description": text}


def _get(
    summary: str,
    kind: str = "application/json",
    is_open: bool = False,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    operation = _operation(summary, kind, is_open=is_open) | ({"parameters": parameters} if parameters else {})
    return {"get": operation, "head": operation}


def _operation(summary: str, *kinds: str, is_open: bool = False) -> dict[str, Any]:
    """The description of one operation. `is_open`: it asks nobody for a key."""
    content: dict[str, Any] = {kind: {} for kind in kinds or ("application/json",)}
    answers = {"200": {"description": "the answer", "content": content}, "default": _error()}
    return {"summary": summary, "responses": answers} | ({"security": []} if is_open else {})


def _post(summary: str, *bodies: type, streams: bool = False) -> dict[str, Any]:
    references = [{"$ref": _REFERENCE.format(name=body.__name__)} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    operation = _operation(summary, "application/json", *["text/event-stream"] * streams)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if streams:
        operation["parameters"] = [_parameter(name, "header", text) for name, text in HEADERS.items()]
    return {"post": operation}


def _form(summary: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(name=TranscriptionBody.__name__)}
    operation = _operation(summary, "application/json", "text/plain", "text/event-stream")
    operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": reference}}}
    operation["parameters"] = [_parameter(name, "header", text) for name, text in HEADERS.items()]
    return {"post": operation}


def _error() -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(name=ErrorAnswer.__name__)}
    return {"description": "an error, in OpenAI's shape", "content": {"application/json": {"schema": schema}}}
