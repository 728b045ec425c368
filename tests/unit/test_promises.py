"""What README promises is held by a test, which says so in a comment above it: # README says: "…"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHRASES = (
    # What it promises
    "Greedy tokens equal transformers' (fp32, CPU)",
    "KV is digested end to end",
    "A seeded request draws the same random numbers wherever it runs",
    "The hand-off protocol is two pure transition tables",
    "Every accepted request ends once",
    "a block that a peer may still write is never reused",
    # Your own model
    "a Hugging Face folder, or a hub name",
    "a local cluster: 2 prefill, 1 decode, router, Redis",
    "Llama 2/3/3.x, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE",
    "tests each against float64",
    "KV is converted on the way",
    "A node that lacks a prefix pulls it from the peer that has it",
    "Layers that look back a window of tokens keep and hand over that window alone",
    "goes to host memory",
    "and disk (`--disk-tier-bytes`",
    "sequences of a decode or single node go on at another one, KV and all",
    "then gets 429 with Retry-After",
    "`/metrics` says why steps were slow",
    "`tandem COMMAND --help=all` explains every option",
    "each is also an environment variable",
    "A variable that is nearly an option's ends the command",
    "`tandem config` shows what is in force and where it comes from",
    "`tandem serve` drains on Ctrl-C, SIGTERM and SIGHUP",
    "says how many requests it waits for",
    "`/dashboard` of the router shows all of it live in a browser",
    "say why one went where",
    "`X-Session-Id` pins a conversation",
    "it replays a trace on a simulated cluster of N nodes",
    "asks every client for that key",
    "429 with Retry-After once it is used up",
    "It is read again when it changes",
    "HTTPS by `--ssl-certfile` and `--ssl-keyfile`",
    "`--allowed-origins` lets web pages ask",
    "maps keys to tenants, whose caches don't see each other",
    "a cluster or watched by Sentinels",
    "with TLS and ACL users",
    # HTTP
    "OpenAI-style HTTP requests",
    "by the model's own chat template",
    "(called in parallel, streamed)",
    "held to a JSON schema, a regular expression, a choice or a grammar",
    "`tool_choice` forces calls",
    "the outputs and scores of transformers' beams",
    "`--chat-template` brings another",
    "Errors have OpenAI's shape and name the field",
    "accepted and named in the log once",
    "`/docs` shows it offline",
    "`--strict-requests` refuses those",
    "`/tokenizer_info` with `--enable-tokenizer-info-endpoint`",
    "Bodies are JSON (415",
    "at most 8 MiB (413)",
)
SAYS = re.compile(r'# README says: "(.*)"')


def held() -> Iterator[str]:
    """The phrases in the comments right above tests."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text()
        if "README says" not in source:
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                above = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 2
                while lines[above].startswith("#"):
                    if found := SAYS.fullmatch(lines[above]):
                        yield found[1]
                    above -= 1


def test_each_promise_is_in_readme_and_held_by_a_test() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert [phrase for phrase in PHRASES if phrase not in readme] == []
    assert sorted(set(PHRASES) ^ set(held())) == [], "listed and not held by a test, or held and not listed"


def test_no_promise_of_that_section_is_left_out() -> None:
    section = (ROOT / "README.md").read_text().partition("## What it promises")[2].partition("\n\nFigures")[0]
    bullets = [" ".join(bullet.split()) for bullet in section.split("\n- ")[1:]]
    assert len(bullets) == 3
    for bullet in bullets[:-1]:  # the last says where to begin to read
        assert any(phrase in bullet for phrase in PHRASES), bullet
