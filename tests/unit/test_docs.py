"""The pages say what is there: files, functions, links and anchors exist, and no page outgrows its reader."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WINGS = ["engine", "node", "kv_connector", "router", "kernels", "prefill_node", "decode_node", "deploy", "llm", "tests"]
PAGES = sorted((ROOT / "docs").glob("*.md"))
AT_THE_TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINKING = [*PAGES, *AT_THE_TOP, *(ROOT / wing / "README.md" for wing in WINGS)]
MOST_WORDS = {"architecture.md": 1_400, "measurements.md": None, "metrics_list.md": None, "seeds.md": None}
MOST_WORDS_ELSEWHERE = 2_000
MOST_FILES_ON_THE_WAY = 40

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`(\w+/[\w./]+\.py)(?::([\w.]+))?`")
SAID = re.compile(rf"(?<![\w/.])((?:{'|'.join(WINGS)}|benchmarks)/[\w/.]+\.py)")
# What begins so hangs on a name that stands elsewhere: a docstring stands alone.
DANGLING = {"Of", "By", "To", "As", "If", "Unless", "Until", "Belongs", "Whose", "Those"}
CITED = re.compile(r"docs/([\w/]+\.md)(?:#([\w-]+))?")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub makes of headings: lower case, spaces to hyphens, other punctuation gone."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions, classes and methods of a file, as `name` and `Class.name`."""
    found = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, *kinds)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, kinds)}
    return frozenset(found)


def problem_of(text: str) -> list[str]:
    """Backticked `path.py` and `path.py:Class.method` of a page that are not there."""
    problems = []
    for path, function in NAMED.findall(text):
        if not (ROOT / path).is_file():
            problems.append(f"there is no {path}")
        elif function and function not in definitions(ROOT / path):
            problems.append(f"{path} defines no {function}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    most = MOST_WORDS.get(page.name, MOST_WORDS_ELSEWHERE)
    num_words = len(page.read_text().split())
    assert most is None or num_words <= most, f"{num_words} words; at most {most}"


@pytest.mark.parametrize("page", [*PAGES, *AT_THE_TOP], ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    assert problem_of(page.read_text()) == []


def test_what_is_missing_is_found() -> None:
    assert problem_of("`node/nowhere.py`") == ["there is no node/nowhere.py"]
    assert problem_of("`node/loop.py:NodeLoop.nothing`") == ["node/loop.py defines no NodeLoop.nothing"]
    assert problem_of("`node/loop.py:NodeLoop.run`, `node/loop.py`") == []


def test_the_tree_has_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.split("```")[3]
    named, parents = set(), []
    for indent, name in re.findall(r"^( *)([\w]+)/ ", tree, flags=re.MULTILINE):
        parents[len(indent) // 2 :] = [name]
        named.add("/".join(parents))
    holding = {name_of(path.parent) for wing in WINGS[:-1] for path in (ROOT / wing).rglob("*.py")}
    in_same_folders = {folder for folder in holding if folder.startswith("kernels/triton_kernels/")}
    assert named == holding - in_same_folders | {"kernels"}


def test_a_requests_way_is_at_most_forty_files() -> None:
    text = (ROOT / "docs" / "a_requests_way.md").read_text()
    named = [path for path, _ in NAMED.findall(text)]
    assert 0 < len(named) <= MOST_FILES_ON_THE_WAY
    assert len(set(named)) == len(named), "no room is entered twice"


def test_every_station_of_a_walk_is_a_function_that_is_there() -> None:
    text = (ROOT / "docs" / "walks.md").read_text()
    stations = re.findall(r"^\d+\. (.*)$", text, flags=re.MULTILINE)
    assert len(stations) >= 5
    assert all(any(function for _, function in NAMED.findall(station)) for station in stations)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_what_the_code_cites_exists() -> None:
    """Pages and anchors, and the files that comments point to."""
    broken = []
    for wing in (*WINGS, "benchmarks"):
        for source in [*(ROOT / wing).rglob("*.py"), *(ROOT / wing).rglob("README.md")]:
            if source == Path(__file__).resolve():
                continue
            text = source.read_text()
            broken += [f"{name_of(source)}: {file}" for file in SAID.findall(text) if not (ROOT / file).is_file()]
            for page, anchor in CITED.findall(text):
                target = ROOT / "docs" / page
                if not target.is_file() or (anchor and anchor not in anchors(target)):
                    broken.append(f"{name_of(source)}: docs/{page}" + (f"#{anchor}" if anchor else ""))
    assert broken == []


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    assert [path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name not in listed] == []


@cache
def documented(text: str) -> list[tuple[str, str | None]]:
    """Modules, functions and classes (these by name) with their docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [(node.name if isinstance(node, ast.ClassDef) else "", ast.get_docstring(node)) for node in nodes]


def docstrings(text: str) -> list[str]:
    return [docstring for _, docstring in documented(text) if docstring]


def test_docstrings_begin_as_sentences_do() -> None:
    assert docstrings('def f():\n    """Of a thread."""') == ["Of a thread."]
    hanging = [
        f"{name_of(source)}: {docstring.splitlines()[0]}"
        for wing in (*WINGS[:-1], "benchmarks")
        for source in (ROOT / wing).rglob("*.py")
        for docstring in docstrings(source.read_text())
        if docstring.split()[0] in DANGLING
    ]
    assert hanging == []


def undocumented(text: str) -> list[str]:
    """Names of public classes without a docstring."""
    return [name for name, docstring in documented(text) if name and name[0] != "_" and not docstring]


def test_every_public_class_says_what_it_stands_for() -> None:
    assert undocumented("class Bare:\n    x = 1\nclass _Own:\n    x = 1") == ["Bare"]
    bare = {
        name_of(source): names
        for folder in (*WINGS, "benchmarks")
        if folder != "tests"
        for source in (ROOT / folder).rglob("*.py")
        if (names := undocumented(source.read_text()))
    }
    assert bare == {}


def test_each_row_of_the_first_documents_has_a_test_or_says_what_lacks() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / "seeds.md").read_text().splitlines() if line[:2] == "| "]
    rows = [row for row in rows if row[0] not in ("| named", "| ---")]
    assert len(rows) == 161
    for name, where, shown in rows:
        if where in ("**open**", "*argued*"):
            assert shown.rstrip(" |"), f"{name} says nothing"
        else:
            assert NAMED.findall(shown), f"{name} names no test"
