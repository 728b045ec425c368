"""The packaging recipe: every source folder is a listed package under tandem, and shadows nobody else's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]


def source_folders() -> set[str]:
    """Folders with Python files below the top-level source folders, as package names."""
    found = set()
    for package, top in FOLDERS.items():
        for path in (ROOT / top).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / top).parts
            found.add(".".join((package, *parts)))
    return found


def test_every_source_folder_is_listed_and_every_listed_package_exists() -> None:
    assert set(PACKAGES) == source_folders()
    assert len(PACKAGES) == len(set(PACKAGES))


def test_every_top_level_folder_with_code_is_mapped() -> None:
    with_code = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert with_code - {"tests", "benchmarks", "build"} == set(FOLDERS.values())


def test_packages_have_an_init_except_the_one_that_would_shadow_another() -> None:
    """transformers imports an optional top-level package called kernels: ours must not look like it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tandem").exists()
    for package in PACKAGES:
        top = next(name for name in FOLDERS if package == name or package.startswith(name + "."))
        folder = ROOT / FOLDERS[top] / package.removeprefix(top).strip(".").replace(".", "/")
        assert top == "tandem.kernels" or (folder / "__init__.py").exists(), folder


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_under_their_name(package: str) -> None:
    imported = importlib.import_module(package)
    assert Path(next(iter(imported.__path__))).is_relative_to(ROOT)


def test_type_checker_sees_the_same_packages() -> None:
    assert set(PROJECT["tool"]["mypy"]["packages"]) == set(FOLDERS)


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
