"""A number with a name says beside it where it comes from: a measurement, a limit of something else, or a guess."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from wings import WINGS

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*$")
FOR_A_GROUP = re.compile(r"^#|# .*as (the next|are the others|the block sizes)")  # above it, or beside its first
# Parts of a format, of an algorithm or of an interface of others: another number would be another thing, not slower.
DEFINITIONS = {
    *("EPOCH", "EXIT_BAD_CONFIG", "HANDLE_BYTES", "HASH_BYTES", "HAS_PARENT", "LENGTH_BYTES", "NONCE_BYTES"),
    *(
        "NO_STEP",
        "COPY",
        "OFFSET_BYTES",
        "WIRE_VERSION",
        "WORD_BYTES",
        "_WORD",
        "_MASK",
        "_GOLDEN",
        "_GAMMA",
        "_SPREADING",
    ),
    *(
        "_PR_SET_NAME",
        "_PR_SET_PDEATHSIG",
        "_IN_STREAM_ORDER",
        "_BESIDE_COMPUTATION",
        "_LAZY_ENABLE_PEER_ACCESS",
        "_FOR_ALL_DEVICES",
    ),
    *("_MIX_1", "_MIX_2", "_WORD_BYTES", "FLAG_BYTES", "HAS_TENANT", "HAS_WINDOWS"),
    *("FP8_LARGEST", "FP8_MAX", "HOPPER", "PERCENTILES", "DEFAULT_THETA"),
}


def is_number(node: ast.expr) -> bool:
    """Whether it is a number, or reckoned from numbers alone."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def unexplained(source: str) -> Iterator[str]:
    """The named numbers of a module without a comment of their own or for their group."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        names = [part.id for part in parts if isinstance(part, ast.Name) and NAME.match(part.id)]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if not names or not any(map(is_number, values)):
            continue
        first = node.lineno - 1
        while first > 0 and (
            lines[first - 1].startswith("#") or NAME.match(lines[first - 1].split(" ")[0].rstrip(":,"))
        ):
            first -= 1
        own = "".join(lines[node.lineno - 1 : node.end_lineno])
        if "#" not in own and not any(map(FOR_A_GROUP.search, lines[first : node.lineno])):
            yield from names


def test_every_named_number_says_where_it_comes_from() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for wing in WINGS
        for path in (ROOT / wing).rglob("*.py")
        for name in unexplained(path.read_text())
    }
    assert not (bad := sorted(one for one in found if one[1] not in DEFINITIONS)), bad
    assert not (unused := sorted(DEFINITIONS - {name for _, name in found})), f"no longer needed: {unused}"


def test_a_number_without_a_word_is_found() -> None:
    group = "# what the kernel keeps\nE = 15\n"
    source = (
        "A = 3\nB = 2 * 1024  # a guess\nC, D = 4, 5\nF = 6  # a guess, as the next\nG = 7\n\n"
        + group
        + "H = -0.5\nI = ''\n\n\nJ = 8\n"
    )
    assert list(unexplained(source)) == ["A", "C", "D", "J"]
