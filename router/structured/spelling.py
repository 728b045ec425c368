"""How texts, marks and regular expressions are written in Lark. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

TEXT = r"TEXT: /(.|\n)*/"


def quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def in_slashes(regex: str) -> str:
    """A regular expression of Lark: slashes and line breaks inside are escaped."""
    parts, is_escaped = [], False
    for char in regex:
        parts.append({"/": "/" if is_escaped else "\\/", "\n": "n" if is_escaped else "\\n"}.get(char, char))
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(parts)}/"


@dataclass(frozen=True)
class Spelling:
    """Writes texts as Lark does. `marks` in them are named by their token ids."""

    marks: Mapping[str, int]

    def lark(self, text: str) -> str:
        return " ".join(f"<[{self.marks[p]}]>" if p in self.marks else quoted(p) for p in self._pieces(text))

    def up_to(self, text: str) -> str:
        """A lexeme, or tokens, of any text up to the first `text` and with it. Behind the first mark in it, which no
        other text has, it may be anything."""
        before, *marked = self._pieces(text)
        if before in self.marks:
            return f"TEXT {self.lark(text)}"
        lexeme = rf"/(.|\n)*{in_slashes(re.escape(before))[1:-1]}/"
        return " ".join([lexeme, *map(self.lark, marked)])

    def until_mark(self, text: str) -> str:
        """A text as far as its first mark, and with that."""
        pieces = self._pieces(text)
        first = next((i for i, piece in enumerate(pieces) if piece in self.marks), len(pieces))
        return "".join(pieces[: first + 1])

    def _pieces(self, text: str) -> list[str]:
        """The marks in a text and what is between them."""
        return [piece for piece in self._at_marks.split(text) if piece]

    @cached_property
    def _at_marks(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self.marks, key=len, reverse=True))) or '$^'})")


def lazy(name: str, lexeme: str) -> str:
    """A rule that ends where it can end first. One that ends with a mark does so by itself."""
    return f"{name}{'[lazy]' if lexeme.endswith('/') else ''}: {lexeme}"
