"""The packaging recipe: every folder with code is a package under tandem by a link, and shadows nobody else's."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from waiting import PATIENCE_S
from wings import WINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

MOST_CLASS_LINES = 300
SHARED_NAMES = {"SamplingParams"}  # what users of the Python interface, and of others like it, call it; and the wire's


def packages() -> list[str]:
    """The wings and every folder with Python files below them, as packages' names."""
    inside = {".".join(("tandem", *path.parent.relative_to(ROOT).parts)) for path in python_files()}
    return sorted(inside | {f"tandem.{wing}" for wing in WINGS})


def folder_of(package: str) -> Path:
    """The folder that a package's files are in; those of tandem itself, which are no link's, included."""
    return ROOT.joinpath(*package.split(".")[1:]) if "." in package else ROOT / package


def python_files() -> list[Path]:
    return [path for wing in WINGS for path in (ROOT / wing).rglob("*.py")]


@cache
def classes() -> list[tuple[Path, str, list[str], int]]:
    """Every class: its file, name, bases and number of lines."""
    return [
        (path, node.name, [ast.unparse(base) for base in node.bases], node.end_lineno - node.lineno + 1)
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_the_package_is_links_to_the_wings() -> None:
    for wing in WINGS:
        link = ROOT / "tandem" / wing
        assert link.is_symlink(), f"{link} is no link; was this cloned with core.symlinks=false?"
        assert os.readlink(link) == f"../{wing}"


def test_every_top_level_folder_with_code_is_linked() -> None:
    with_code = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")}
    assert with_code - {"tests", "benchmarks", "build", "tandem"} == set(WINGS)


def test_the_installer_finds_every_package_and_its_data() -> None:
    find = importlib.import_module("setuptools").find_namespace_packages
    rule = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = set(find(str(ROOT), include=rule["include"], exclude=rule["exclude"]))
    with_code = {name for name in found if any(ROOT.joinpath(*name.split(".")).rglob("*.py"))}  # no rest of a move
    assert with_code == {"tandem", *packages()}
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        for pattern in patterns:
            assert list(folder_of(package).glob(pattern)), f"{package} has no {pattern}"


def test_every_file_that_is_not_for_developers_is_in_the_wheel() -> None:
    """What no package lists is missing where only the wheel is."""
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = {path for package in data for pattern in data[package] for path in folder_of(package).glob(pattern)}
    for_developers = {".py", ".pyc", ".md", ".sh"}
    there = {path for wing in WINGS for path in (ROOT / wing).rglob("*.*") if path.suffix not in for_developers}
    of_clones = {path for name in ("containers", "helm") for path in (ROOT / "deploy" / name).rglob("*")}
    assert {path for path in there if path.is_file()} - of_clones - listed == set()


def test_no_class_is_what_python_3_10_refuses() -> None:
    """A generic NamedTuple is an error there when it is imported, which neither mypy nor ruff sees."""
    bases = [names for _, _, names, _ in classes()]
    assert [names for names in bases if "NamedTuple" in names and len(names) > 1] == []


def test_the_package_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem", "--version"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert said.startswith("tandem ")


def test_packages_have_an_init_except_the_one_that_would_shadow_another() -> None:
    """transformers imports an optional top-level package called kernels: ours must not look like it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for package in packages():
        init = ROOT.joinpath(*package.split(".")[1:], "__init__.py")
        assert package == "tandem.kernels" or init.exists(), init


@pytest.mark.parametrize("package", packages())
def test_packages_import_under_their_name(package: str) -> None:
    imported = importlib.import_module(package)
    assert Path(next(iter(imported.__path__))).is_relative_to(ROOT)


def test_transformers_works_from_the_repository_root_beside_a_package_called_kernels(tmp_path: Path) -> None:
    """With somebody's `kernels` installed and this root as working directory, AutoConfig must still load."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    code = (
        "import sys; sys.path.remove(''); import kernels, transformers;"
        f"assert kernels.__file__.startswith({str(tmp_path)!r}), kernels.__file__;"
        f"print(transformers.AutoConfig.from_pretrained({str(ROOT / 'deploy' / 'demo_model')!r}).model_type);"
        "import tandem.kernels; assert tandem.kernels.__path__"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "llama"


def test_no_two_classes_have_one_name() -> None:
    """A name stands for one thing, wherever it is read."""
    places = defaultdict(list)
    for path, name, _, _ in classes():
        places[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in SHARED_NAMES} == {}


def test_a_class_that_grew_is_two_objects() -> None:
    assert {name for _, name, _, num_lines in classes() if num_lines > MOST_CLASS_LINES} == set()
