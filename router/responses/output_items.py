"""An answer's deltas as the items of a response, and as the events that tell of them in OpenAI's order."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tandem.router.chat.chat import Chat
from tandem.router.chat.deltas import CallArguments, CallStart, Content, Delta, Reasoning

Event = tuple[str, dict[str, Any]]  # its type and its other fields
Rows = list[dict[str, Any]]  # log-probabilities, one object a token

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


@dataclass(frozen=True, slots=True)
class _TextKind:
    name: str
    prefix: str  # the beginning of its ids
    part: str  # the type of its one part, and of the events of its text
    beside: dict[str, Any]  # further fields of the item
    beside_text: dict[str, Any]  # further fields of the part


_MESSAGE = _TextKind("message", "msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []})
_REASONING = _TextKind("reasoning", "rs", "reasoning_text", {"summary": []}, {})


class _TextItem:
    """A message, or reasoning: one part of text."""

    def __init__(self, kind: _TextKind) -> None:
        self.kind = kind
        self.item_id = f"{kind.prefix}_{secrets.token_hex(12)}"
        self._text, self._rows = "", Rows()

    def as_dict(self, status: str) -> dict[str, Any]:
        content = [] if status == IN_PROGRESS else [self._part()]
        return {"id": self.item_id, "type": self.kind.name, **self.kind.beside, "content": content, "status": status}

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": self._part()})]

    def add(self, text: str, rows: Rows) -> Event:
        self._text += text
        self._rows += rows
        return f"{self.kind.part}.delta", {"content_index": 0, "delta": text, **self._logprobs(rows)}

    def end(self, rows: Rows) -> list[Event]:
        """The events that end the item. `rows` are the log-probabilities of tokens without text."""
        self._rows += rows
        done = {"content_index": 0, "text": self._text, **self._logprobs(self._rows)}
        return [(f"{self.kind.part}.done", done), ("content_part.done", {"content_index": 0, "part": self._part()})]

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind.part, "text": self._text, **self.kind.beside_text, **self._logprobs(self._rows)}

    def _logprobs(self, rows: Rows) -> dict[str, Any]:
        return {"logprobs": list(rows)} if self.kind is _MESSAGE else {}


class _CallItem:
    """A call of a function."""

    def __init__(self, name: str, call_id: str) -> None:
        self.item_id = f"fc_{secrets.token_hex(12)}"
        self._name, self._call_id, self._arguments = name, call_id, ""

    def as_dict(self, status: str) -> dict[str, Any]:
        said = {"call_id": self._call_id, "name": self._name, "arguments": self._arguments}
        return {"id": self.item_id, "type": "function_call", **said, "status": status}

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str) -> Event:
        self._arguments += text
        return "function_call_arguments.delta", {"delta": text}

    def end(self, rows: Rows) -> list[Event]:
        return [("function_call_arguments.done", {"name": self._name, "arguments": self._arguments})]


class OutputItems:
    """The items of an answer as they grow. One item at a time is open; another kind of delta, or another call, closes
    it."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.done: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None
        self._rows = Rows()  # of tokens whose text is still to come

    def read(self, deltas: Iterable[Delta], rows: Rows) -> list[Event]:
        """The events of these deltas. `rows` are the log-probabilities of their tokens, kept for messages only."""
        self._rows += rows
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                events += self._begin(_CallItem(delta.name, self._chat.call_id()))
            elif isinstance(delta, CallArguments):
                assert isinstance(self._open, _CallItem)
                events.append(self._of_item(self._open.add(delta.text)))
                self._rows = Rows()
            else:
                events += self._read_text(delta)
        return events

    def _read_text(self, delta: Content | Reasoning) -> list[Event]:
        kind = _MESSAGE if isinstance(delta, Content) else _REASONING
        events: list[Event] = []
        if not isinstance(self._open, _TextItem) or self._open.kind is not kind:
            events = self._begin(_TextItem(kind))
        assert isinstance(self._open, _TextItem)
        rows = Rows()
        if kind is _MESSAGE:
            rows, self._rows = self._rows, rows
        events.append(self._of_item(self._open.add(delta.text, rows)))
        return events

    def _begin(self, item: _TextItem | _CallItem) -> list[Event]:
        events = self._close(COMPLETED, Rows())
        self._open = item
        added: Event = ("output_item.added", {"output_index": len(self.done), "item": item.as_dict(IN_PROGRESS)})
        return [*events, added, *map(self._of_item, item.begin())]

    def finish(self, status: str) -> list[Event]:
        """Closes the open item, if there is one: no more will come."""
        return self._close(status, self._rows)

    def _close(self, status: str, rows: Rows) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        place = {"item_id": item.item_id, "output_index": len(self.done)}
        events = [(kind, {**place, **said}) for kind, said in item.end(rows)]
        self.done.append(item.as_dict(status))
        return [*events, ("output_item.done", {"output_index": len(self.done) - 1, "item": self.done[-1]})]

    def _of_item(self, event: Event) -> Event:
        assert self._open is not None
        return event[0], {"item_id": self._open.item_id, "output_index": len(self.done), **event[1]}
