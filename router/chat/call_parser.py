"""The base of parsers of tool calls: a generator reads the text, and the JSON of each call, and gathers deltas."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Set
from typing import Any, ClassVar

from tandem.router.chat.deltas import CallArguments, CallStart, Content, Delta
from tandem.router.chat.incoming import Incoming, Reader
from tandem.router.structured.calls import CallForm

ARGUMENTS = ("arguments", "parameters")
BESIDE = ("name", "type", "id", *ARGUMENTS)  # what a call's object may begin with


class CallParser(ABC):
    """Reads tool calls out of an answer. `names` are those of the tools there are; `markers` are the special tokens
    whose text it must see."""

    markers: ClassVar[tuple[str, ...]] = ()
    has_short_ids: ClassVar[bool] = False  # the model's template takes ids of nine letters and digits alone

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._in = Incoming()
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._reader = self._read()

    @property
    def is_reasoning(self) -> bool:
        return False

    def feed(self, text: str) -> list[Delta]:
        self._in.add(text)
        return self._read_on()

    def finish(self) -> list[Delta]:
        self._in.close()
        return self._read_on()

    def _read_on(self) -> list[Delta]:
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    @classmethod
    @abstractmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        """How a model with this template writes calls. `marks` are those of the markers that are tokens of its own."""

    @abstractmethod
    def _read(self) -> Reader[None]:
        """Reads to the end of the text, whatever it is."""

    # --- what is said -----------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))

    def _start(self, name: str) -> None:
        self._in.forget()  # what has begun a call is no content any more
        self._deltas.append(CallStart(self._num_calls, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        self._deltas.append(CallArguments(self._num_calls - 1, text))

    # --- what is read -----------------------------------------------------------------------------------------

    def _call_or_content(self, prefix: str, is_known_only: bool = False) -> Reader[bool]:
        """Reads a call's object and returns whether it was whole. If none begins here, `prefix` and what was read are
        content."""
        self._in.mark()
        before = self._num_calls
        yield from self._in.spaces()
        is_whole = yield from self._call_object(is_known_only)
        read = self._in.since_mark()
        if self._num_calls == before:
            self._content(prefix + read)
        return is_whole

    def _literal_or_content(self, wanted: str) -> Reader[None]:
        """Reads `wanted` and white space before it; if something else comes, that white space is content."""
        spaces = yield from self._in.spaces()
        if not (yield from self._in.literal(wanted)) and (yield from self._in.peek()):
            self._content(spaces)

    def _content_until(self, *markers: str) -> Reader[str]:
        """Takes the text before the first marker as content, without white space around calls; returns the marker."""
        return (yield from self._in.until(markers, self._content, trim=True, trim_end=self._num_calls > 0))

    def _call_object(self, is_known_only: bool) -> Reader[bool]:
        """Reads `{"name": …, "arguments": {…}}`, its members in any order, and returns whether it was whole. Nothing is
        emitted before both are known."""
        if not (yield from self._in.literal("{")):
            return False
        name, early, is_first, has_started = "", None, True, False
        while True:
            yield from self._in.spaces()
            key = yield from self._key()
            if key is None or (is_first and key not in BESIDE):
                return False
            is_first = False
            if key == "name":
                name = (yield from self._text()) or ""
                if not name or (is_known_only and name not in self._names):
                    return False
            elif key in ARGUMENTS and name and not has_started:
                has_started = yield from self._streamed(name)
                if not has_started:
                    return False
            else:
                value = yield from self._value()
                if value is None:
                    return False
                early = value if key in ARGUMENTS else early
            yield from self._in.spaces()
            if not (yield from self._in.literal(",")):
                break
        if not (yield from self._in.literal("}")) or not name:
            return False
        if not has_started:
            self._start(name)
            self._arguments(_as_object(early or "null"))
        return True

    def _key(self) -> Reader[str | None]:
        key = yield from self._text()
        yield from self._in.spaces()
        if key is None or not (yield from self._in.literal(":")):
            return None
        yield from self._in.spaces()
        return key

    def _text(self) -> Reader[str | None]:
        """Reads a JSON string and returns its value; None: something else comes."""
        if (yield from self._in.peek()) != '"':
            return None
        raw = yield from self._value()
        value = None if raw is None else _decoded(raw)
        return value if isinstance(value, str) else None

    def _value(self) -> Reader[str | None]:
        parts: list[str] = []
        is_whole = yield from self._in.json_value(parts.append)
        return "".join(parts) if is_whole else None

    def _streamed(self, name: str) -> Reader[bool]:
        """Reads arguments: an object is passed on as it comes, a string that holds one in one piece. False: the text
        ended, or they are no JSON."""
        if (yield from self._in.peek()) == "{":
            self._start(name)
            return (yield from self._in.json_value(self._arguments))
        raw = yield from self._value()
        if raw is None:
            return False
        self._start(name)
        self._arguments(_as_object(raw))
        return True


def _as_object(raw: str) -> str:
    """The text of arguments that are given as an object, as null, or as a string that holds one of both."""
    value = _decoded(raw)
    if isinstance(value, str):
        raw = value
    return "{}" if not raw.strip() or raw.strip() == "null" else raw


def _decoded(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
