"""What importing costs: routers and pure modules live without torch, package inits import nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocked())
"""


def run_blocked(blocked: set[str], code: str) -> None:
    program = BLOCK.format(blocked=blocked) + code
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def modules_of(folder: str) -> list[str]:
    return [
        ".".join(("tandem", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_the_router_imports_without_torch() -> None:
    names = modules_of("router")
    assert "tandem.router.process.main" in names
    run_blocked({"torch", "triton", "transformers"}, "\n".join(f"import {name}" for name in names))


def test_nodes_of_tokens_import_without_transformers() -> None:
    names = ["tandem.node.process", "tandem.node.ranks.main", *modules_of("decode_node"), *modules_of("prefill_node")]
    run_blocked({"transformers"}, "\n".join(f"import {name}" for name in names))


def test_traces_that_nobody_asked_for_import_nothing() -> None:
    code = "import sys, tandem.router.process.main; print('opentelemetry.sdk' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_the_directory_imports_without_torch() -> None:
    names = modules_of("kv_connector/directory")
    assert len(names) > 4
    run_blocked({"torch", "zmq"}, "\n".join(f"import {name}" for name in names))


def test_contracts_import_without_torch_and_sockets() -> None:
    names = modules_of("engine/contracts") + modules_of("engine/blocks") + modules_of("engine/scheduling")
    assert "tandem.engine.contracts.wire.codec" in names
    run_blocked({"torch", "zmq", "redis", "fastapi"}, "\n".join(f"import {name}" for name in names))


def test_package_inits_are_docstrings() -> None:
    """But for the one that offers the names of `from tandem import …`, each imported when it is used."""
    for path in set(ROOT.glob("[a-z]*/**/__init__.py")) - {ROOT / "tandem" / "__init__.py"}:
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), (
            f"{path.relative_to(ROOT)} does more than say what it is"
        )
