"""Text that comes in parts, read as if it were there: readers are generators that yield where they need more.

What is read depends on the characters alone, not on where the parts were cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Emit = Callable[[str], object]

SPACE = " \t\r\n"


class Incoming:
    """Text that comes by `add`, in parts, and ends by `close`. A reader that yields resumes after one of the two."""

    def __init__(self) -> None:
        self._text, self._at, self._mark = "", 0, -1
        self._closed = False
        self.trimmed = ""  # what the last `until` left out before its marker

    def add(self, text: str) -> None:
        kept = self._at if self._mark < 0 else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = -1 if self._mark < 0 else 0

    def close(self) -> None:
        self._closed = True

    # --- going back -----------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Keeps the text from here on, until `since_mark` returns it or `forget` drops it."""
        self._mark = self._at

    def since_mark(self) -> str:
        text = "" if self._mark < 0 else self._text[self._mark : self._at]
        self._mark = -1
        return text

    def forget(self) -> None:
        """Drops the text since the mark, which may become long."""
        self._mark = -1

    # --- readers --------------------------------------------------------------------------------------------------

    def has_more(self) -> Reader[bool]:
        """Waits for more text; False: the text has ended."""
        while self._at == len(self._text):
            if self._closed:
                return False
            yield
        return True

    def peek(self) -> Reader[str]:
        """The next character, "" at the end."""
        return self._text[self._at] if (yield from self.has_more()) else ""

    def take(self) -> str:
        """Reads the character that was peeked at."""
        self._at += 1
        return self._text[self._at - 1]

    @property
    def is_drained(self) -> bool:
        """Whether all that has come was read."""
        return self._at == len(self._text)

    def spaces(self) -> Reader[str]:
        found = ""
        while (char := (yield from self.peek())) and char in SPACE:
            found += self.take()
        return found

    def literal(self, wanted: str) -> Reader[bool]:
        """Reads `wanted` if it comes next, else nothing. Returns whether it did."""
        while True:
            known = self._text[self._at : self._at + len(wanted)]
            if known == wanted:
                self._at += len(wanted)
                return True
            if self._closed or not wanted.startswith(known):
                return False
            yield

    def until(self, markers: Sequence[str], emit: Emit, trim: bool = False, trim_end: bool = False) -> Reader[str]:
        """Emits the text before the first of `markers` as it becomes certain, reads the marker and returns it; "" at
        the end of the text. With `trim` white space right before a marker is left out, with `trim_end` also what is
        at the end of the text."""
        assert all(marker[0] not in marker[1:] for marker in markers), "two could overlap"
        while True:
            text = self._text[self._at :]
            found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                before = text[:at].rstrip(SPACE) if trim else text[:at]
                self.trimmed = text[len(before) : at]
                self._emit(emit, before)
                self._at += at + len(marker)
                return marker
            if self._closed:
                self._emit(emit, text.rstrip(SPACE) if trim_end else text)
                self._at = len(self._text)
                return ""
            certain = text[: len(text) - _beginning_at_end(text, markers)]
            if trim or trim_end:
                certain = certain.rstrip(SPACE)
            self._emit(emit, certain)
            self._at += len(certain)
            yield

    def rest(self, emit: Emit) -> Reader[None]:
        yield from self.until((), emit)

    def json_value(self, emit: Emit) -> Reader[bool]:
        """Emits the text of one JSON value as it comes. False: the text ended, or brackets don't match. Inside of it
        only strings and brackets are looked at."""
        first = yield from self.peek()
        if first and first in "{[":
            return (yield from self._nested(emit))
        if first == '"':
            return (yield from self._string(emit))
        part = ""
        while (char := (yield from self.peek())) and char not in SPACE + ",]}":
            part += self.take()
        self._emit(emit, part)
        return part in ("null", "true", "false") or part.lstrip("-")[:1].isdigit()

    def _nested(self, emit: Emit) -> Reader[bool]:
        closers, part = "", ""
        while True:
            if self.is_drained and part:
                emit(part)
                part = ""
            if not (yield from self.has_more()):
                return False
            char = self._text[self._at]
            if char == '"':
                self._emit(emit, part)
                part = ""
                if not (yield from self._string(emit)):
                    return False
                continue
            if char in "]}" and char != closers[-1:]:
                self._emit(emit, part)
                return False
            part += self.take()
            if char in "{[":
                closers += "}" if char == "{" else "]"
            elif char in "]}":
                closers = closers[:-1]
                if not closers:
                    emit(part)
                    return True

    def _string(self, emit: Emit) -> Reader[bool]:
        part, escaped = self.take(), False
        while True:
            if self.is_drained and part:
                emit(part)
                part = ""
            if not (yield from self.has_more()):
                return False
            char = self.take()
            part += char
            if char == '"' and not escaped:
                emit(part)
                return True
            escaped = char == "\\" and not escaped

    @staticmethod
    def _emit(emit: Emit, text: str) -> None:
        if text:
            emit(text)


def _beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers), default=1)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(len(marker) > length and marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
