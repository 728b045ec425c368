"""Items and tools of a body of /v1/responses as messages and tools of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.conversation import REASONING, plain_text
from tandem.router.media.parts import PlacedPart, kind_of

Item = Mapping[str, Any]
Message = dict[str, Any]


def messages_of(given: str | Sequence[Item], instructions: str | None) -> list[Message]:
    """The messages of a conversation. What an assistant said, thought and called in one go is one message.

    Raises InvalidRequestError that names the item."""
    reader = _Reader()
    if instructions is not None:
        reader.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        reader.messages.append({"role": "user", "content": given})
    else:
        for i, item in enumerate(given):
            reader.read(item, f"input[{i}]")
    return reader.messages


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._kinds: dict[str, Callable[[Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._result,
        }

    def read(self, item: Item, place: str) -> None:
        kind = item.get("type") or "message"
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            what = ", ".join(self._kinds)
            _bad(f"{place}.type is {str(kind)[:64]!r}; it must be one of {what} (nothing else is stored or run here)")
        read(item, place)

    def _message(self, item: Item, place: str) -> None:
        role = item.get("role")
        if role not in ("user", "system", "developer", "assistant"):
            _bad(f"{place}.role is {str(role)[:64]!r}; it must be user, system, developer or assistant")
        content = _content(item.get("content"), f"{place}.content")
        if role == "assistant":
            self._open({"content", "tool_calls"})["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, item: Item, place: str) -> None:
        """Reads reasoning: its text, or its summary where there is no text. Encrypted reasoning is ignored."""
        for field in ("content", "summary"):
            parts = item.get(field) or ()
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            if text := "\n".join(text for text in texts if isinstance(text, str)):
                self._open({REASONING, "content", "tool_calls"})[REASONING] = text
                return

    def _call(self, item: Item, place: str) -> None:
        names = ("call_id", "name", "arguments")
        call_id, name, arguments = (_text_of(item, field, place) for field in names)
        function = {"name": name, "arguments": arguments}
        calls = self._open(set()).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, item: Item, place: str) -> None:
        call_id, output = _text_of(item, "call_id", place), plain_text(item.get("output"), f"{place}.output")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _open(self, taken: set[str]) -> Message:
        """The assistant's message under way if it has none of the fields `taken`, else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or taken & last.keys():
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _content(content: Any, place: str) -> str | list[Any]:
    """Text, or, where there is more than text, the parts. Raises InvalidRequestError that names a part."""
    if not isinstance(content, list) or not any(map(kind_of, content)):
        return plain_text(content, place)
    return [
        PlacedPart(part, f"{place}[{i}]") if kind_of(part) else {"text": plain_text([part], place, first=i)}
        for i, part in enumerate(content)
    ]


def tools_of(tools: Sequence[Item]) -> list[dict[str, Any]]:
    """The tools as chat has them, with a function's fields one level deeper. Chat's checks refuse other tools."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Item) -> dict[str, Any]:
    if tool.get("type") != "function":
        return dict(tool)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _text_of(item: Item, field: str, place: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        _bad(f"{place}.{field} must be text")
    return value


def _bad(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="messages")
