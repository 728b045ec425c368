"""Shows a line once that several processes say alike. Pure: lines and the time come in."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field

HOLD_S = 5.0  # a guess: processes that find the same find it within moments
SHOWN = 100  # characters of a line that is told of again
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(,\d+)? ")
_JSON_TIME = re.compile(r'^\{"time": "[^"]*", (?="level")')  # as JsonFormatter begins


def without_time(line: str) -> str:
    """What a line of a log says, coloured, plain or JSON; "" for a line that is none, or goes on with one."""
    plain = _COLOUR.sub("", line)
    said = _JSON_TIME.sub("{", plain) if plain[:1] == "{" else _TIME.sub("", plain)
    return said if said != plain else ""


@dataclass(slots=True)
class _Said:
    until: float
    again: Counter[str] = field(default_factory=Counter)  # by whom, and how often


class SaidOnce:
    """Lets the first line of a kind pass; others that say the same within `HOLD_S` are named in one line after that."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}
        self._held: set[str] = set()  # names whose newest record was held back

    def admit(self, name: str, line: str, now: float) -> bool:
        """Whether to show `line` of process `name`. Lines that go on with a record share its fate."""
        text = without_time(line)
        if not text:
            return name not in self._held
        self._held.discard(name)
        if text not in self._said:
            self._said[text] = _Said(now + HOLD_S)
            return True
        self._said[text].again[name] += 1
        self._held.add(name)
        return False

    def due(self, now: float) -> list[str]:
        """A line for each kind whose time is over and that was held back; to be called now and then."""
        over = {text: said for text, said in self._said.items() if now >= said.until}
        for text in over:
            del self._said[text]
        return [f"{_names(said.again)} said the same: {_shown(text)}" for text, said in over.items() if said.again]


def _shown(text: str) -> str:
    if text[0] == "{":
        text = json.loads(text).get("message", text)
    return text[:SHOWN]


def _names(again: Counter[str]) -> str:
    return ", ".join(name if times == 1 else f"{name} ({times} times)" for name, times in sorted(again.items()))
