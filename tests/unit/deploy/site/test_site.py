"""The documentation as a site: every page is found through it, and every link leads somewhere. Built for real where
mkdocs is installed."""

from __future__ import annotations

import importlib.util
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.deploy.site.hook import ROOT, generated_pages, shown_pages
from tandem.deploy.site.python_names import PAGES
from tandem.deploy.site.tables import cell

LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages_of(nav: Any) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


def settings() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_each_page_is_in_the_navigation_once() -> None:
    named = sorted(pages_of(settings()["nav"]))
    shown = [str(path.relative_to(ROOT)) for path in shown_pages() if path.suffix == ".md"]
    assert named == sorted([*shown, *generated_pages()])
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} <= set(named)


def test_links_lead_to_what_the_site_has() -> None:
    """Those between the repository's pages, too: a link to a folder is one that a site can't follow."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in shown_pages() if path.suffix == ".md"}
    there = {str(path.relative_to(ROOT)) for path in shown_pages()} | set(generated_pages())
    broken = []
    for page, text in {**texts, **generated_pages()}.items():
        for link in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            path = link.partition("#")[0]
            if (
                "://" not in link
                and path
                and posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) not in there
            ):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_lists_begin_after_an_empty_line() -> None:
    """GitHub takes them without; the site's Markdown makes one paragraph of both."""
    glued = [
        f"{path.name}: {line}"
        for path in shown_pages()
        if path.suffix == ".md"
        for before, line in re.findall(
            r"^(\S.*)\n((?:[-*]|1\.) .*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
        )
        if not re.match(r"([-*]|\d+\.) |#", before)
    ]
    assert glued == []


def test_the_reference_has_every_option_and_every_path() -> None:
    pages = generated_pages()
    serve = pages["reference/commands/serve.md"]
    for words in (
        "INT`<br>`TANDEM_MAX_NUM_SEQS`",
        "## Lora",
        "[docs/elastic.md](../../docs/elastic.md)",
    ):
        assert words in serve
    assert "`--hf-overrides" not in serve, "another engine's, which is refused"
    http = pages["reference/http.md"]
    assert "| `/v1/completions` | POST | Complete prompts | [CompletionBody](#completionbody) |" in http
    assert "| `max_tokens` |" in http
    assert "/tokenizer_info" in http
    assert all(text.startswith("# ") for text in pages.values())


def test_named_modules_are_there() -> None:
    modules = [module for _, _, modules in PAGES.values() for module in modules]
    assert len(set(modules)) == len(modules)
    assert [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").is_file()] == []


def test_cells_show_what_they_are_given() -> None:
    assert cell("a|b <c> *d* [e] `x|y`\n docs/elastic.md#leanings", "../") == (
        r"a\|b &lt;c> \*d\* \[e\] `x\|y` [docs/elastic.md#leanings](../docs/elastic.md#leanings)"
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (`make docs`)")
def test_it_is_built_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="(https?:[^"]*)"', page.read_text())
        assert fetched == [], page
    assert "gpu_memory_utilization" in (tmp_path / "search" / "search_index.json").read_text()
    kernels = (tmp_path / "reference" / "kernels" / "index.html").read_text()
    assert "tandem.kernels.api.attention.Attention" in kernels
