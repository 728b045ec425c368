"""The few of Go's templates that deploy/helm is written in, so that charts are rendered where there is no helm.

What it doesn't know is an error: the chart stays within it. Where `helm` is on PATH, a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ACTION = re.compile(r"(\s*)\{\{(-)?\s*(/\*.*?\*/|.*?)\s*(-)?\}\}(\s*)", re.DOTALL)
WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[()|]|[^\s()|]+)')
Scope = dict[str, Any]  # "." and "$", and variables by their names


class RequiredValueError(Exception):
    """What `required` says."""


def render_chart(chart: Path, values: Mapping[str, Any], release: str = "demo") -> dict[str, list[Any]]:
    """The objects of each template by its name, as `helm template` would print them with `values` over the chart's."""
    facts = yaml.safe_load((chart / "Chart.yaml").read_text())
    merged = _merged(yaml.safe_load((chart / "values.yaml").read_text()), values)
    dot = {
        "Values": merged,
        "Chart": {"AppVersion": facts["appVersion"], "Name": facts["name"]},
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
    }
    defined: dict[str, list[str]] = {}
    files = sorted((chart / "templates").glob("*"), key=lambda file: file.suffix != ".tpl")  # definitions first
    texts = {file.name: _Template(defined).text(_pieces(file.read_text()), {".": dot, "$": dot}) for file in files}
    return {
        name: [each for each in yaml.safe_load_all(text) if each] for name, text in texts.items() if ".yaml" in name
    }


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, Mapping):
        return above
    return {**below, **{name: _merged(below.get(name), value) for name, value in above.items()}}


def _pieces(text: str) -> list[str]:
    """Text and actions in turn; actions are the odd ones. White space next to {{- and -}} is gone."""
    pieces, end = [], 0
    for found in ACTION.finditer(text):
        before, trims_left, action, trims_right, after = found.groups()
        pieces += [text[end : found.start()] + ("" if trims_left else before), action]
        end = found.end() if trims_right else found.end() - len(after)
    pieces.append(text[end:])
    # A gap between two actions is seen by the left one alone: what the right one trims is cut here.
    trims = [bool(found[2]) for found in ACTION.finditer(text)]
    return [
        piece.rstrip() if index % 2 == 0 and index // 2 < len(trims) and trims[index // 2] else piece
        for index, piece in enumerate(pieces)
    ]


class _Template:
    def __init__(self, defined: dict[str, list[str]]) -> None:
        self._defined = defined
        self._functions: dict[str, Callable[..., Any]] = {
            "include": lambda name, dot: self.text(self._defined[name], {".": dot, "$": dot}),
            "default": lambda otherwise, value: value or otherwise,
            "required": self._required,
            "printf": lambda form, *args: form % args,
            "quote": lambda value: '"' + _text(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
            "squote": lambda value: f"'{_text(value)}'",
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip().removesuffix("\n..."),
            "nindent": lambda num, text: "\n" + "\n".join(" " * num + line for line in text.splitlines()),
            "not": lambda value: not value,
            "eq": lambda value, other: value == other,
            "add": lambda *values: sum(values),
            "div": lambda value, by: value // by,
        }

    @staticmethod
    def _required(message: str, value: Any) -> Any:
        if value in (None, ""):
            raise RequiredValueError(message)
        return value

    def text(self, pieces: list[str], scope: Scope) -> str:
        out: list[str] = []
        index = 0
        while index < len(pieces):
            out.append(pieces[index])
            if index + 1 == len(pieces):
                break
            action = pieces[index + 1]
            keyword = action.split()[0]
            if keyword in ("if", "range", "define"):
                body, otherwise, index = self._block(pieces, index + 2)
                out += self._blocks(keyword, action.removeprefix(keyword).strip(), body, otherwise, scope)
                continue
            if not action.startswith("/*"):
                out.append(_text(self._value(action, scope)))
            index += 2
        return "".join(out)

    @staticmethod
    def _block(pieces: list[str], begin: int) -> tuple[list[str], list[str], int]:
        """The body and the else of a block whose first text is at `begin`, and where it goes on after its end."""
        depth, middle = 1, None
        for index in range(begin + 1, len(pieces), 2):
            keyword = pieces[index].split()[0]
            depth += (keyword in ("if", "range", "define")) - (keyword == "end")
            if keyword == "else" and depth == 1:
                assert pieces[index] == "else", f"else with a condition is not built: {pieces[index]}"
                middle = index
            if not depth:
                cut = index if middle is None else middle
                return pieces[begin:cut], [] if middle is None else pieces[middle + 1 : index], index + 1
        raise AssertionError("a block has no end")

    def _blocks(self, keyword: str, head: str, body: list[str], otherwise: list[str], scope: Scope) -> Iterator[str]:
        if keyword == "define":
            self._defined[head.strip('"')] = body
        elif keyword == "if":
            yield self.text(body if self._value(head, scope) else otherwise, scope)
        else:
            names, _, source = head.partition(":=")
            key, value = (name.strip() for name in names.split(","))
            found = self._value(source, scope)
            for index, each in sorted(found.items()) if isinstance(found, dict) else enumerate(found):
                yield self.text(body, {**scope, ".": each, key: index, value: each})

    def _value(self, expression: str, scope: Scope) -> Any:
        words = WORD.findall(expression)
        value = self._pipeline(words, scope)
        assert not words, f"{{{{ {expression} }}}} goes on with {words}"
        return value

    def _pipeline(self, words: list[str], scope: Scope) -> Any:
        """Consumes the words of a pipeline, up to its end or a closing parenthesis."""
        given: list[Any] = []
        while True:
            terms: list[Any] = []
            function = self._functions.get(words[0]) if words else None
            if function is not None:
                words.pop(0)
            while words and words[0] not in ("|", ")"):
                terms.append(self._term(words, scope))
            given = [function(*terms, *given) if function is not None else terms[0]]
            if not words or words.pop(0) == ")":
                return given[0]

    def _term(self, words: list[str], scope: Scope) -> Any:
        word = words.pop(0)
        if word == "(":
            return self._pipeline(words, scope)
        if word[0] == '"':
            return word[1:-1].replace('\\"', '"')
        if word.isdecimal():
            return int(word)
        assert word[0] in ".$", f"there is no function {word} here"
        name, *path = word.split(".") if word[0] == "$" else (".", *word[1:].split("."))
        value = scope[name]
        for part in filter(None, path):
            value = None if value is None else value.get(part)
        return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
