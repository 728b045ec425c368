"""The record of the GPU suite says which tests a run was of. Its tests are stand-ins, so that no GPU is needed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SUITE = {
    "test_ring.py": "import pytest\npytestmark = pytest.mark.gpu\ndef test_ring(): pass\ndef test_rows(): pass\n",
    "test_peers.py": "import pytest\npytestmark = pytest.mark.several_gpus\ndef test_rows(): pass\n",
}
ALL = "1 × Stand-in, all tests"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a suite of three tests."""
    spec = importlib.util.spec_from_file_location("gpu_run", Path(__file__).parents[1] / "gpu" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    folder = tmp_path / "gpu"
    folder.mkdir()
    for name, text in SUITE.items():
        (folder / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, value in (("ROOT", tmp_path), ("HERE", folder), ("RESULTS", folder / "RESULTS.md")):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "KERNEL_WORKERS", 1)
    monkeypatch.setattr(module, "NODE_WORKERS", 1)
    monkeypatch.setattr(module, "device_names", lambda: ["Stand-in"])
    return module


def test_a_run_of_some_tests_is_recorded_beside_that_of_all(run: ModuleType) -> None:
    run.write_section(ALL, "- all passed")
    assert run.main(["-k", "rows", "gpu/test_ring.py"]) == 0
    _, newest, before = run.RESULTS.read_text().split("\n## ")
    assert newest.startswith("1 × Stand-in, tests by `pytest -k rows gpu/test_ring.py`\n")
    assert "\n- 1 passed, 0 failed, 0 skipped, " in newest
    assert before == f"{ALL}\n\n- all passed\n"


@pytest.mark.parametrize(
    ("arguments", "several", "title"),
    [
        ([], False, "all tests"),
        ([], True, "tests of several GPUs"),
        (["-kring"], True, "tests of several GPUs by `pytest -kring`"),
        (["--deselect", "a.py::b"], False, "tests by `pytest --deselect a.py::b`"),
        (["-k", "ring\n or rows"], False, "tests by `pytest -k 'ring or rows'`"),
    ],
)
def test_titles_say_what_pytest_was_asked_for(run: ModuleType, arguments: list[str], several: bool, title: str) -> None:
    assert run.what_ran(arguments, several) == title


def test_files_of_the_suite_stand_in_its_place(run: ModuleType) -> None:
    for place in ("gpu", "gpu/test_ring.py", "gpu/test_ring.py::test_rows", str(run.HERE / "test_peers.py")):
        assert run.is_place(place)
    for other in ("", "-x", "ring", "gpu/test_none.py", "pytest.ini", "4"):
        assert not run.is_place(other)
