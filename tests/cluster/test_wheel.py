"""A wheel built of this repository serves the demo model where the repository is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest
from waiting import PATIENCE_S, wait_until

from tandem.deploy.redis_server import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
COPIED = ["pyproject.toml", "README.md", "LICENSE", "tandem"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tandem` of an environment with the wheel, which borrows everything else from this one."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    # A copy, since a build leaves folders behind; links are followed, so the wings come with tandem/.
    files = [str(ROOT / name) for name in COPIED]
    subprocess.run(["cp", "-rL", *files, str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("tandem_serve-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
    # Folders named in a .pth file are searched last, and .pth files within them (an editable Tandem's) are not read.
    borrowed = [path for path in sys.path if any(Path(path).glob("*.dist-info"))]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    return folder / "venv" / "bin" / "tandem"


def run(command: Path, *arguments: str, folder: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [str(command), *arguments], cwd=folder, env=outside, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_the_wheel_is_what_runs(command: Path, tmp_path: Path) -> None:
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert stated
    assert run(command, "--version", folder=tmp_path) == f"tandem {stated[1]}\n"
    where = "import tandem.deploy.cli as cli, tandem; print(cli.__file__, tandem.__path__[0])"
    module, package = run(command.with_name("python"), "-c", where, folder=tmp_path).split()
    assert Path(module).is_relative_to(command.parents[1])
    assert Path(package, "py.typed").is_file()


def test_it_serves_the_demo_model_from_an_empty_folder(command: Path, tmp_path: Path) -> None:
    port = free_port()
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (tmp_path.parent / "log").open("w+") as log:
        arguments = [str(command), "serve", "--port", str(port), "--device", "cpu", "--num-blocks", "128"]
        server = subprocess.Popen(arguments, cwd=tmp_path, env=outside, stdout=log, stderr=log)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S)

        def answers() -> bool:
            assert server.poll() is None, Path(log.name).read_text()
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, "the server", 4 * PATIENCE_S)
            body = {"model": "demo_model", "prompt": "def read_lines(path):", "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 8
            assert client.get("/docs").text.startswith("<!DOCTYPE html>")
        finally:
            client.close()
            server.send_signal(signal.SIGTERM)
            server.wait(2 * PATIENCE_S)
    assert server.returncode == 0
