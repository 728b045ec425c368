"""Structural tags as Lark: free text in which triggers begin tags, and what is within a tag is held to a format. Pure.

The formats are xgrammar's, by which vLLM's clients name them; the older shape, `structures` and `triggers`, is one of
them under another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.structured.parts import Part, as_lark, lark_part, schema_of, schema_part
from tandem.router.structured.spelling import TEXT, Spelling, in_slashes, lazy

MAX_DEPTH = 32  # formats within formats; a guess


def structural_tag_part(asked: Any, spelling: Spelling, param: str) -> Part:
    """The grammar of a structural tag, as an object or as its JSON. Raises InvalidRequestError that names `param`."""
    if isinstance(asked, str):
        try:
            asked = msgspec.json.decode(asked)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{param}: the structural tag is no JSON: {error}", param=param) from None
    return _TagGrammar(spelling, param).part(asked)


class _TagGrammar:
    """The rules of one structural tag, which are written while its formats are walked through."""

    def __init__(self, spelling: Spelling, param: str) -> None:
        self._spelling, self._param = spelling, param
        self._rules: list[str] = []
        self._depth = 0

    def part(self, asked: Any) -> Part:
        if isinstance(asked, dict) and "structures" in asked:
            asked = {**asked, "type": "triggered_tags", "tags": asked["structures"]}
        elif isinstance(asked, dict) and "format" in asked:
            asked = asked["format"]
        else:
            self._bad("a structural tag has `format`, or `structures` and `triggers`")
        return lark_part("\n".join([f"start: {self._format(asked, is_last=True)}", *self._rules, TEXT]))

    def _format(self, asked: Any, is_last: bool) -> str:
        """What a format is in Lark. `is_last`: nothing follows it, so that free text has an end."""
        kind = asked.get("type") if isinstance(asked, dict) else None
        make = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if kind not in make:
            self._bad(f"a format's type is {str(kind)[:64]!r}; it may be {', '.join(make)}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._bad(f"formats lie in each other more than {MAX_DEPTH} deep")
        found = make[kind](asked, is_last)
        self._depth -= 1
        return found

    def _const_string(self, asked: dict[str, Any], is_last: bool) -> str:
        return self._spelling.lark(self._text(asked, "value"))

    def _json_schema(self, asked: dict[str, Any], is_last: bool) -> str:
        schema = schema_part(schema_of(asked.get("json_schema"), self._param, ": json_schema"))["json_schema"]
        return f"%json {msgspec.json.encode(schema).decode()}"

    def _regex(self, asked: dict[str, Any], is_last: bool) -> str:
        return self._rule(in_slashes(self._text(asked, "pattern")))

    def _grammar(self, asked: dict[str, Any], is_last: bool) -> str:
        return f"%lark {{\n{as_lark(self._text(asked, 'grammar'), self._param)}\n}}"

    def _any_text(self, asked: dict[str, Any], is_last: bool) -> str:
        if not is_last:
            self._bad("any_text may be the content of a tag, or come last: else nobody knows where it ends")
        return "TEXT"

    def _sequence(self, asked: dict[str, Any], is_last: bool) -> str:
        elements = self._list(asked, "elements")
        return " ".join(self._format(each, is_last and each is elements[-1]) for each in elements)

    def _or(self, asked: dict[str, Any], is_last: bool) -> str:
        return self._one_of([self._format(each, is_last) for each in self._list(asked, "elements")])

    def _tag(self, asked: dict[str, Any], is_last: bool) -> str:
        return f"{self._spelling.lark(self._text(asked, 'begin'))} {self._inside(asked, is_last)}"

    def _triggered_tags(self, asked: dict[str, Any], is_last: bool) -> str:
        if not is_last:
            self._bad("triggered_tags must come last: else nobody knows where the text between its tags ends")
        triggers, tags = self._list(asked, "triggers"), self._list(asked, "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            self._bad("a trigger is a text that isn't empty")
        cuts = {trigger: self._spelling.until_mark(trigger) for trigger in triggers}
        blocks: dict[str, list[str]] = {cut: [] for cut in cuts.values()}
        for tag in tags:
            begin = self._text(tag, "begin")
            cut = next((cut for trigger, cut in cuts.items() if begin.startswith(trigger)), None)
            if cut is None:
                self._bad(f"the tag {begin[:64]!r} begins with none of the triggers")
            blocks[cut].append(f"{self._spelling.lark(begin[len(cut) :])} {self._inside(tag, is_last=False)}")
        ways = [f"{self._lead(cut)} {self._one_of(found)}" for cut, found in blocks.items() if found]
        tagged = self._one_of(ways)
        if asked.get("stop_after_first"):
            return tagged if asked.get("at_least_one") else self._one_of([tagged, "TEXT"])
        return f"{tagged}{'+' if asked.get('at_least_one') else '*'} TEXT"

    def _tags_with_separator(self, asked: dict[str, Any], is_last: bool) -> str:
        tag = self._one_of([self._tag(each, is_last=False) for each in self._list(asked, "tags")])
        more = f"({self._spelling.lark(self._text(asked, 'separator', may_be_empty=True))} {tag})*"
        found = tag if asked.get("stop_after_first") else f"({tag} {more})"
        return found if asked.get("at_least_one") else f"{found}?"

    def _inside(self, tag: dict[str, Any], is_last: bool) -> str:
        """A tag's content and end. A tag of the older shape has a schema in its place."""
        content = tag.get("content", {"type": "json_schema", "json_schema": tag.get("schema")})
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) and ends else [ends]
        if not all(isinstance(end, str) for end in ends):
            self._bad("a tag's end is a text, or several")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._one_of([self._lead(end) for end in ends])
        end = self._one_of([self._spelling.lark(end) or '""' for end in ends])
        return f"{self._format(content, is_last and not any(ends))} {end}"

    def _lead(self, text: str) -> str:
        """Any text up to the first `text`, and with it."""
        return self._rule(self._spelling.up_to(text), is_lazy=True)

    def _rule(self, lexeme: str, is_lazy: bool = False) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(lazy(name, lexeme) if is_lazy else f"{name}: {lexeme}")
        return name

    def _text(self, asked: Any, field: str, may_be_empty: bool = False) -> str:
        text = asked.get(field) if isinstance(asked, dict) else None
        if not isinstance(text, str) or not (text or may_be_empty):
            self._bad(f"`{field}` must be a text")
        return text

    def _list(self, asked: dict[str, Any], field: str) -> list[Any]:
        found = asked.get(field)
        if not isinstance(found, list) or not found:
            self._bad(f"`{field}` must be a list that isn't empty")
        return found

    @staticmethod
    def _one_of(ways: Sequence[str]) -> str:
        return f"({' | '.join(ways)})"

    def _bad(self, problem: str) -> NoReturn:
        raise InvalidRequestError(f"{self._param}: {problem}", param=self._param)
