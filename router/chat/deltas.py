"""The deltas that parsers make of output text, and the interface of parsers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what a model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of call number `index` of the answer, counted from 0; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Reasoning | Content | CallStart | CallArguments


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same deltas in fewer: neighbours that continue each other become one."""
    found = deltas[:1]
    for delta in deltas[1:]:
        last = found[-1]
        if isinstance(delta, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and delta.index == last.index:
            found[-1] = CallArguments(last.index, last.text + delta.text)
        else:
            found.append(delta)
    return found


class OutputParser(Protocol):
    """A parser of one answer's text. However the text is cut, the deltas of its parts add up to the same. Neither
    `feed` nor `finish` raises, whatever the text."""

    @property
    def is_reasoning(self) -> bool:
        """Whether text that comes now is reasoning."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class PlainText:
    """A parser for which all text is content."""

    is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@dataclass(slots=True)
class Call:
    """One call of a tool, as it grows. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """What an answer's deltas add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] | None = None

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallStart):
                self.calls = [*(self.calls or []), Call(delta.name)]
            else:
                assert self.calls is not None
                self.calls[delta.index].arguments += delta.text
