"""One option out of a field of a configuration dataclass: its kind, its bounds, its help."""

from __future__ import annotations

import argparse
import dataclasses
import operator
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from msgspec import Meta

from tandem.engine.contracts.config import (
    CacheOptions,
    LoraOptions,
    MediaOptions,
    ModelOptions,
    SchedulerOptions,
    Timeouts,
    WebOptions,
)
from tandem.engine.contracts.errors import ConfigError

COMPONENTS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "timeouts": Timeouts,
    "web": WebOptions,
    "lora": LoraOptions,
    "media": MediaOptions,
}


@dataclass(frozen=True)
class Option:
    """One field of one or more components. `meta` holds the bounds of a number, `group` names the component."""

    name: str
    kind: type  # int, float, str, bool or tuple (of str)
    default: Any
    help: str
    group: str = ""
    choices: tuple[str, ...] = ()
    meta: Meta | None = None
    is_positional: bool = False

    @property
    def flag(self) -> str:
        return "--node" if self.name == "nodes" else "--" + self.name.replace("_", "-")

    @property
    def help_with_default(self) -> str:
        """Help in which the default stands; where it has a meaning of its own, at that meaning."""
        if self.is_positional or self.default in ("", ()):
            return self.help
        value = str(self.default).removesuffix(".0") if self.default == 0 else str(self.default)
        meaning = re.compile(rf"(^|; |[(]){re.escape(value)}(?=: )")
        if meaning.search(self.help):
            return meaning.sub(lambda found: f"{found[0]}, the default", self.help, count=1)
        return f"{self.help} (default: {self.default})"

    def parse(self, given: Any, origin: str) -> Any:
        """`given` from the environment (text) or YAML (typed). Raises ConfigError that names `origin`."""
        value: Any
        if self.kind is bool:
            value = _BOOLS.get(str(given).lower())
        elif self.kind is tuple:
            parts = given.split(",") if isinstance(given, str) else given
            value = tuple(str(part).strip() for part in parts) if isinstance(parts, list | tuple) else None
        elif self.choices:
            text = str(given).lower()
            value = text if text in self.choices else _AS_CHOICE.get(text)
        else:
            value = _number_or_text(self.kind, given)
        if value is None or (self.choices and value not in self.choices) or not self._is_within(value):
            raise ConfigError(f"{origin} is {given!r}: it must be {self._wanted()}")
        return value

    def from_flag(self, text: str) -> Any:
        """Parses for argparse, which names the flag."""
        try:
            return self.parse(text, "it")
        except ConfigError:
            raise argparse.ArgumentTypeError(f"{text!r}: it must be {self._wanted()}") from None

    def _is_within(self, value: Any) -> bool:
        return all(holds(value, bound) for _, holds, bound in self._bounds())  # never so for nan

    def _wanted(self) -> str:
        bounds = " and ".join(f"{word} {bound:g}" for word, _, bound in self._bounds() if abs(bound) < 1e6)
        return " or ".join(self.choices) or f"{_KIND_NAMES[self.kind]}{', ' * bool(bounds)}{bounds}"

    def _bounds(self) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
        if self.meta is None:
            return []
        found = [(word, holds, getattr(self.meta, name)) for name, word, holds in _BOUNDS]
        return [(word, holds, bound) for word, holds, bound in found if bound is not None]


_BOUNDS = (
    ("ge", "at least", operator.ge),
    ("gt", "more than", operator.gt),
    ("le", "at most", operator.le),
    ("lt", "less than", operator.lt),
)
_KIND_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list",
    str: "text",
}
# What vLLM's users call the same.
_AS_CHOICE = {"fp8": "fp8_e4m3", "half": "float16", "float": "float32", "warn": "warning", "hf": "safetensors"} | {
    **dict.fromkeys(("vllm", "openai", "sglang", "/v1/completions"), "completions"),
    **dict.fromkeys(("openai-chat", "sglang-oai-chat", "/v1/chat/completions", "chat_completions"), "chat"),
}
# As vLLM reads them: 8k tokens are 8,000, and 8K are 8,192.
_UNITS = {
    "": 1,
    **{unit: 1000**n for n, unit in enumerate("kmgt", 1)},
    **{unit: 1024**n for n, unit in enumerate("KMGT", 1)},
}
_WITH_UNIT = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgt]?)(?:i?B)?", re.IGNORECASE)
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _number_or_text(kind: type, given: Any) -> Any:
    if isinstance(given, bool) or (kind is int and isinstance(given, float)) or isinstance(given, list | dict):
        return None
    try:
        return _whole(given) if kind is int and isinstance(given, str) else kind(given)
    except (TypeError, ValueError):
        return None


def _whole(text: str) -> int | None:
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None:
        return None
    number = Fraction(found[1]) * _UNITS[found[2]]
    return int(number) if number.denominator == 1 else None


def options_of(*components: type, positional: str = "") -> dict[str, Option]:
    """The options of configuration dataclasses; where two share a name, the first one's default holds."""
    found: dict[str, Option] = {}
    for component in components:
        group = component.__name__.removesuffix("Options").lower()
        hints = typing.get_type_hints(component, include_extras=True)
        for field in dataclasses.fields(component):
            if field.name in COMPONENTS and hints[field.name] is COMPONENTS[field.name]:
                continue
            if field.name != "role":
                found.setdefault(field.name, _option(field, hints[field.name], group, field.name in positional.split()))
    return found


def _option(field: dataclasses.Field[Any], hint: Any, group: str, is_positional: bool) -> Option:
    """The option of one field, whose hint is Annotated[kind, bounds where there are any, help]."""
    kind, *notes, text = typing.get_args(hint)
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    kind = str if choices else typing.get_origin(kind) or kind
    default = "" if field.default is dataclasses.MISSING else field.default
    return Option(field.name, kind, default, text, group, choices, notes[0] if notes else None, is_positional)


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a message about an unknown name: the known one most like it. "" when none is as like it as `likeness`,
    from 0 to 1."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=5, cutoff=likeness)
    close.sort(
        key=lambda each: sorted(each) != sorted(name)
    )  # the same letters in another order, if there is such a one
    return f"; did you mean {close[0]}?" if close else ""
