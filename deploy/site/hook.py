"""What mkdocs calls: the site is laid out as the repository is, so that each link of a page leads to the same place on
both, and nothing is copied or rewritten."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from tandem.deploy.site.commands import command_pages
from tandem.deploy.site.http_api import http_page
from tandem.deploy.site.python_names import python_pages

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def generated_pages() -> dict[str, str]:
    """Markdown of what is read off the code, by the page's path."""
    return {**command_pages(), **http_page(), **python_pages()}


def shown_pages() -> list[Path]:
    """Pages of the repository, their pictures, and the files that they link to which are no pages."""
    wings = [path.resolve() for path in (ROOT / "tandem").iterdir() if path.is_symlink()]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")]
    pages += [ROOT / "tests" / "gpu" / "RESULTS.md", *(page for wing in wings for page in wing.rglob("*.md"))]
    linked = {(page.parent / link).resolve() for page in pages for link in _LINK.findall(page.read_text())}
    pictures = {path for path in (ROOT / "docs").rglob("*.*") if path.suffix != ".md"}
    return sorted({*pages, *pictures, *(path for path in linked if path.is_file() and path.is_relative_to(ROOT))})


def on_startup(**_: Any) -> None:
    """Griffe, which reads docstrings, gets its folder: later it would be told that there is none."""
    _lay_out_names(ROOT / ".cache" / "names" / "tandem")


def on_config(config: Any) -> Any:
    """Headings get the anchors that they have on GitHub."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def _lay_out_names(package: Path) -> None:
    """Links to the wings as one package, in which kernels/ has an __init__.py: griffe passes by what has none."""
    shutil.rmtree(package, ignore_errors=True)
    (package / "kernels").mkdir(parents=True)
    (package / "kernels" / "__init__.py").touch()
    shutil.copy(ROOT / "tandem" / "__init__.py", package)  # no link: griffe would look beside what it leads to
    for path in (ROOT / "tandem").iterdir():
        if path.is_symlink() and path.name != "kernels":
            (package / path.name).symlink_to(path.resolve())
    for path in (ROOT / "kernels").iterdir():
        (package / "kernels" / path.name).symlink_to(path)


def on_files(files: Any, config: Any) -> Any:
    """The repository's pages in the place of those of docs/ alone, and what is generated."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in shown_pages():
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files
