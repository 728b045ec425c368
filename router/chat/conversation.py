"""Messages and tools of a request, checked, and as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.media.parts import PlacedPart, kind_of
from tandem.router.structured.calls import Tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
REASONING = "reasoning_content"  # as templates call it

Fields = Mapping[str, Any]


class Arguments(dict[str, Any]):
    """The arguments of a call, as an object for most templates and as text for those that concatenate it."""

    def __init__(self, value: Fields, text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


class ContentForm(NamedTuple):
    """How content is told to the template of a model that takes more than text: as a list of parts, or as text in which
    `placeholder` stands for each part that isn't text."""

    as_parts: bool
    placeholder: str

    def of(self, content: Any, place: str) -> str | list[Fields]:
        """Content as templates take it: text, or parts. Raises InvalidRequestError that names a part's place."""
        given = content if isinstance(content, list) else [content]
        kinds = [kind_of(part) for part in given]
        texts = [
            self.placeholder if kind else plain_text([part], place, first=i)
            for i, (part, kind) in enumerate(zip(given, kinds, strict=True))
        ]
        if not self.as_parts:
            return "\n".join(texts)
        return [
            {"type": kind, f"{kind}_url": ""} if kind else {"type": "text", "text": text}
            for kind, text in zip(kinds, texts, strict=True)
        ]


def as_templates_expect(
    messages: Sequence[Fields], knows_developer: bool, form: ContentForm | None = None
) -> list[dict[str, Any]]:
    """The messages in the form that templates take; `form` None: those of a model of text alone. Raises
    InvalidRequestError that names the message and its field."""
    return [_message(message, f"messages[{i}]", knows_developer, form) for i, message in enumerate(messages)]


def _message(message: Fields, place: str, knows_developer: bool, form: ContentForm | None) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    role = found.get("role")
    if role not in ROLES:
        _bad("messages", f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    if role == "developer" and not knows_developer:
        found["role"] = "system"
    read = plain_text if form is None or "content" not in found else form.of
    found["content"] = read(found.get("content", ""), f"{place}.content")
    if REASONING not in found and isinstance(found.get("reasoning"), str):
        found[REASONING] = found["reasoning"]
    if calls := found.pop("tool_calls", None):
        if not isinstance(calls, list):
            _bad("messages", f"{place}.tool_calls must be a list")
        found["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
        found["content"] = found["content"] or None  # templates know a message of calls alone by its None
    return found


def plain_text(content: Any, place: str, first: int = 0) -> str:
    """The text of content that is text or a list of text parts, of which `first` is the first one's place in a longer
    list. Raises InvalidRequestError that names its place."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _bad("messages", f"{place} must be text or a list of text parts")
    texts = []
    for i, part in enumerate(content, first):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
        if (kind is not None and kind not in TEXT_PARTS) or not isinstance(text, str):
            where = part.place if isinstance(part, PlacedPart) else f"{place}[{i}]"
            _bad("messages", f"{where} is of the type {str(kind)[:64]!r}: what stands here takes text alone")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _bad("messages", f"{place} must be {{'type': 'function', 'function': {{'name': …, 'arguments': …}}}}")
    return {"type": "function", **call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """The arguments of an earlier call, parsed. Those that are no object stay as they are, since a model's slip must
    not end its conversation."""
    text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return given
    return Arguments(value, text or "{}") if isinstance(value, dict) else given


def tool_names(tools: Sequence[Any]) -> frozenset[str]:
    """The names of these tools. Raises InvalidRequestError that names a tool which is no function."""
    names = set()
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            _bad("tools", f"tools[{i}].type is {str(kind)[:64]!r}; there are functions alone")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            _bad("tools", f"tools[{i}].function.name must be text")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            _bad("tools", f"tools[{i}].function.parameters must be a JSON schema")
        names.add(function["name"])
    return frozenset(names)


def called_tools(tools: Sequence[Fields]) -> list[Tool]:
    """The tools as grammars take them. `tool_names` must have found all of them to be functions."""
    functions = [tool["function"] for tool in tools]
    return [Tool(each["name"], each.get("parameters"), each.get("strict") is True) for each in functions]


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
