"""Text of other hands as cells of Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PAGE = re.compile(r"\bdocs/([\w/]+\.md)(#[\w-]+)?")
_CODE = re.compile(r"(`[^`]*`)")


def cell(text: str, to_root: str) -> str:
    """`text` in one line, its punctuation shown as it is, but for code between backticks; pages of docs/ that it names
    are links. `to_root`: the way from the page to the repository's root, such as "../"."""
    parts = _CODE.split(" ".join(text.split()))
    shown = [part.replace("|", r"\|") if index % 2 else _plain(part, to_root) for index, part in enumerate(parts)]
    return "".join(shown)


def _plain(text: str, to_root: str) -> str:
    escaped = re.sub(r"([\\*\[\]|])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")
    return _PAGE.sub(lambda found: f"[{found[0]}]({to_root}{found[0]})", escaped)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are Markdown already."""
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
