"""A base of one class is that class cut in two: then the two are parts, and one has the other. Read off the source.

Interfaces, exceptions and messages are bases of whatever number there is.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from wings import WINGS

ROOT = Path(__file__).resolve().parents[2]


def bases_in(source: str) -> dict[str, list[str]]:
    """Of each class its bases, as written; what another package calls by the same name as a class of ours is dotted."""
    tree = ast.parse(source)
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tandem.")
        for alias in node.names
    }
    found = {}
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            names = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in kind.bases]
            found[kind.name] = [f".{name}" if name in foreign else name for name in names]
    return found


def roots(name: str, bases: dict[str, list[str]]) -> set[str]:
    """What a class derives from in the end, outside the product."""
    return {root for base in bases[name] for root in (roots(base, bases) if base in bases else {base})}


def is_message_or_exception(root: str) -> bool:
    kind = getattr(builtins, root, None)
    return root == "msgspec.Struct" or (isinstance(kind, type) and issubclass(kind, BaseException))


def single_bases(sources: Iterable[str]) -> set[str]:
    bases = {name: of_one for source in sources for name, of_one in bases_in(source).items()}
    num_children = Counter(base for of_one in bases.values() for base in of_one if base in bases)
    return {
        name
        for name, num in num_children.items()
        if num == 1
        and not {".ABC", ".Protocol"} & set(bases[name])
        and not any(map(is_message_or_exception, roots(name, bases)))
    }


def test_no_class_is_cut_in_two_by_inheritance() -> None:
    paths = [path for folder in WINGS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert single_bases(path.read_text(encoding="utf-8") for path in paths) == set()


def test_a_class_that_is_cut_in_two_is_found() -> None:
    interface = "from typing import Protocol\nclass Port(Protocol): ...\nclass Plug(Port): ..."
    errors = "class BadError(ValueError): ...\nclass WorseError(BadError): ..."
    assert single_bases(["class Half: ...", "class Whole(Half): ...", interface, errors]) == {"Half"}
