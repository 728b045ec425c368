"""Every command of the pages is one that there is: parsed by the real parser, or looked up.

Which of them run, and why others don't: tests/fakes/documented.py.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml
from documented import NOT_RUN, PAGES, ROOT, RUN_BY, Block, blocks, inline, languages, name_of, programs, why_not_run

from tandem.deploy.cli import make_parser

OURS = ("tandem", ".venv/bin/tandem")
# What the tests that run commands can run: tests/cluster/test_documented_commands.py.
RUNNABLE = {*OURS, "curl", "grep", "export", "start", "post", "for", "umask", "."}
# Options of other people's programs, by the page that names them.
FOREIGN = {
    "docs/clients.md": (
        "disable-stream extra-request-body return-logprob logprobs profile use-server-token-count "
        "ready-check-timeout-sec num-warmups tasks flush-cache extra-body no-stream model_args"
    ),
    "docs/containers.md": "from-literal build-arg gpus shm-size set build",
    "docs/quickstart.md": "quiet",
    "docs/security.md": "cacert",
    "docs/several_hosts.md": "batch signal gpus-per-task",
    "docs/supported.md": "no-deps wheel-dir",
    "tests/README.md": "import-mode",
}
NO_COMMAND = {"tandem decode-0"}  # what `ps` calls a process
HOLDING_SCRIPTS = ("benchmarks", "tests/soak", "tests/gpu")


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def parse(words: list[str]) -> None:
    """Raises SystemExit, other than 0, for what `tandem` would refuse."""
    words = words[1:] if words[:1] == ["config"] and words[1:2] and words[1] in commands() else words
    try:
        make_parser().parse_args(words)
    except SystemExit as ended:
        if ended.code:
            raise


@cache
def options_of_scripts() -> frozenset[str]:
    """Every option that a benchmark or a script of the tests takes."""
    text = "".join(path.read_text() for folder in HOLDING_SCRIPTS for path in (ROOT / folder).glob("*.py"))
    return frozenset(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text)) | {"--tune"}


@cache
def options_of(script: Path) -> frozenset[str]:
    """Those of one, and of the modules beside it that it imports."""
    text = script.read_text()
    names = [node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    beside = [script.with_name(f"{name}.py") for name in names]
    texts = [text, *(path.read_text() for path in beside if path.is_file())]
    return frozenset(found for each in texts for found in re.findall(r'"(--?[a-z][\w-]*)"', each))


SH = [pytest.param(block, line, id=f"{block.page}: {line[:50]}") for block in blocks("sh") for line in block.lines]


def check(call: list[str]) -> None:
    """Raises what says what isn't there: an option, a file, a target."""
    program, *words = call
    if program in OURS:
        parse(words)
    elif program == "make":
        check_make(words)
    elif Path(program).name == "python" and words[0] != "-m":
        script = ROOT / words[0]
        script = script / "__main__.py" if script.is_dir() else script
        own = words[: words.index("--")] if "--" in words else words
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= options_of(script) | set(commands()["decode"]._option_string_actions), (script, given)
    elif Path(program).name == "pytest" or program.startswith("tests/"):
        named = [program, *words] if program.startswith("tests/") else words
        assert all((ROOT / word).exists() for word in named if word.startswith("tests/")), call
    elif program in ("pip", ".venv/bin/pip"):
        check_extras(words)
    elif program in ("docker", "cd"):
        named = [word for word in words if word.startswith("deploy/")]
        named += [f"deploy/containers/{word}" for word in words if word.endswith(".yaml")]
        assert all((ROOT / path).exists() for path in named), call
    elif program == "helm":
        check_values(words)


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony
    assert set(targets) <= set(phony[1].split())
    for word in words:
        name, is_variable, value = word.partition("=")
        assert not is_variable or re.search(rf"^{name} \?=", makefile, flags=re.MULTILINE), word
        if name == "ARGS" and targets == ["serve"]:
            parse(["serve", *shlex.split(value)])


def check_extras(words: list[str]) -> None:
    settings = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", settings.partition("\n[")[0], flags=re.MULTILINE))
    named = [name for word in words for found in re.findall(r"\[([\w,]+)\]", word) for name in found.split(",")]
    assert set(named) <= extras, words


def check_values(words: list[str]) -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "tandem" / "values.yaml").read_text())
    for before, word in itertools.pairwise(words):
        if before == "--set":
            path, value = word.partition("=")[0].split("."), values
            for name in path:
                if value == {}:  # free: what Kubernetes takes
                    break
                assert name in value, word
                value = value[name]


@pytest.mark.parametrize(("block", "line"), SH)
def test_a_command_is_one_that_there_is(block: Block, line: str) -> None:
    for call in programs(line):
        check(call)
    if not why_not_run(block.page, line):
        first = programs(line)[0][0].removesuffix("()")
        assert first in RUNNABLE, "no test runs this, and fakes/documented.py doesn't say why"


def test_what_is_not_run_stands_there() -> None:
    lines = [(block.page, line) for block in blocks("sh") for line in block.lines]
    unused = [(page, start) for page, start in NOT_RUN if not any(p == page and x.startswith(start) for p, x in lines)]
    assert unused == []


def test_whatever_else_is_fenced_is_a_drawing_or_has_a_test() -> None:
    others = languages() - {"", "sh", "text"}
    assert {(language, block.page) for language in others for block in blocks(language)} == set(RUN_BY)
    for (language, page), test in RUN_BY.items():
        assert re.search(rf"\b{Path(page).stem}\b", (ROOT / test).read_text()), f"{test} names no {page}"
        for block in blocks(language, page):
            if language == "python":
                compile(block.text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            else:
                assert yaml.safe_load(block.text), page


def test_commands_stand_in_blocks_that_are_called_shell() -> None:
    """Whatever else is fenced is a drawing, or of another language, so no command hides from these tests."""
    called = {
        program for block in blocks("sh") for line in block.lines for call in programs(line) for program in call[:1]
    }
    first_words = called - {"{", "}", "do", "done", "for", "start", "post"} | {"python", "bash", "promtool"}
    hiding = [
        f"{block.page}: {line}"
        for language in ("", "text", "bash", "shell", "console")
        for block in blocks(language)
        for line in block.text.splitlines()
        if line.split()[:1] and line.split()[0].lstrip("$") in first_words
    ]
    assert hiding == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_sentence_tells_to_type_is_there(page: Path) -> None:
    for text in inline(page):
        if text.startswith(("tandem ", ".venv/bin/tandem ")) and text not in NO_COMMAND:
            check_mention(text.partition(" ")[2])
        elif re.match(r"(\.venv/bin/)?(make|python|pytest|pip|docker) ", text):
            for call in programs(re.sub(r"<[^>]*>", "x", text)):
                check(call)


def check_mention(text: str) -> None:
    """A command with some of its options, values left out or not."""
    word, _, rest = text.partition(" ")
    command = make_parser() if word.startswith("-") else commands()["serve" if word == "COMMAND" else word]
    known = {*command._option_string_actions, *commands()["serve"]._option_string_actions}
    given = {found.partition("=")[0] for found in re.findall(r"(?<!\S)\[?(--?[a-z][\w=-]*)", f"{word} {rest}")}
    assert given <= known, text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_option_that_a_page_names_is_some_commands(page: Path) -> None:
    ours = {flag for command in commands().values() for flag in command._option_string_actions} | {"--version"}
    foreign = {f"--{name}" for name in FOREIGN.get(name_of(page), "").split()}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]+)", page.read_text()))
    assert sorted(named - ours - options_of_scripts() - foreign) == []


def test_a_wrong_command_is_found() -> None:
    wrong = ["tandem serve --prefil 1", "make tests", 'make serve ARGS="--nothing"', "python benchmarks/front.py --no",
             "pytest tests/nowhere", "pip install '.[nothing]'", "docker build -f deploy/Dockerfile .",
             "helm install x --set nothing=1", ".venv/bin/python tests/soak kill --nothing"]  # fmt: skip
    for line in wrong:
        with pytest.raises((SystemExit, AssertionError)):
            check(programs(line)[0])
    with pytest.raises(AssertionError):
        check_mention("drain NODE [--undone]")
    with pytest.raises(KeyError):
        check_mention("drian NODE")
