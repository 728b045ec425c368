"""A stranger's first minutes: does what README says under "Two commands", and nothing else, and says how long each step
took.

    python benchmarks/first_minutes.py [--make-argument TORCH_INDEX=...] [--tests]

The repository is cloned into an empty folder, HOME is empty, and of the environment only PATH is kept, so nothing helps
that this machine had before but its packages; for a machine without those, run it in a container. Port 8000 must be
free.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
READY_S, STEP_S, END_S = 1800, 120, 30
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Stranger:
    """Reads the README of a clone and follows it."""

    def __init__(self, folder: Path) -> None:
        home = folder / "home"
        home.mkdir()
        self.clone = folder / "tandem"
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.rows: list[tuple[str, float, str]] = []

    def runs(self, command: str, limit_s: float = STEP_S, where: Path | None = None) -> None:
        """Runs a command of a shell, and keeps its time and what it said. Raises RuntimeError if it fails."""
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=where or self.clone, env=self._environment, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.rows.append((command, time.monotonic() - begun, done.stdout))
        if done.returncode:
            raise RuntimeError(f"{command!r} ended with {done.returncode}:\n{done.stdout}")

    @contextmanager
    def serving(self, command: str, name: str) -> Iterator[None]:
        """Starts the server as README does, waits until it serves, and ends it as Ctrl-C does. `name` is for the
        table."""
        begun, log = time.monotonic(), self.clone.parent / "serve.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.clone, env=self._environment,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        try:
            while not re.search(r"^serving .*:8000$", log.read_text(), re.MULTILINE):
                if server.poll() is not None or time.monotonic() > begun + READY_S:
                    raise RuntimeError(f"{command!r} does not serve:\n{log.read_text()}")
                time.sleep(0.1)
            self.rows.append((name, time.monotonic() - begun, log.read_text()))
            yield
            begun = time.monotonic()
            os.killpg(server.pid, signal.SIGINT)
            server.wait(END_S)
            self.rows.append(("Ctrl-C", time.monotonic() - begun, ""))
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)

    def blocks(self) -> list[tuple[str, str]]:
        """(language, text) of the fenced blocks that README has between its two commands and what needs no server."""
        text = (self.clone / "README.md").read_text()
        part = text[text.index("## Two commands") : text.index("\nWithout a server")]
        return [(found[1], found[2]) for found in BLOCK.finditer(part)]


def follow(stranger: Stranger, arguments: str, with_tests: bool) -> None:
    (_, commands), *rest = stranger.blocks()
    named = [line.partition("#")[0].strip() for line in commands.splitlines()]
    if named != ["make", "make serve", "make test"]:
        raise RuntimeError(f"README's two commands are others now: {named}")
    stranger.runs("make")
    serve = f"make serve {arguments}".strip()
    with stranger.serving(serve, "make serve, until it serves"):
        for language, text in rest:
            if language == "python":
                (stranger.clone / "first.py").write_text(text)
                stranger.runs(".venv/bin/python -c 'import openai' 2>&1 || .venv/bin/python -m pip install -q openai")
                stranger.runs(".venv/bin/python first.py")
                continue
            for command in re.split(r"\n(?=\S)", text.strip()):
                # A chat at the terminal reads lines until there are no more.
                stranger.runs(f"echo hello | {command}" if command.startswith(".venv/bin/tandem chat") else command)
        stranger.runs("curl -sf http://localhost:8000/dashboard | grep -c '<title>'")
    with stranger.serving(serve, "make serve, the second time"):
        pass
    if with_tests:
        stranger.runs(f"make test {arguments}", limit_s=5400)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-argument", action="append", default=[], help="given to make, as README says for torch")
    parser.add_argument("--tests", action="store_true", help="`make test`, too")
    options = parser.parse_args()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            parser.error("port 8000 is taken: README's commands use it")
    with tempfile.TemporaryDirectory() as folder:
        stranger, failed = Stranger(Path(folder)), ""
        try:
            stranger.runs(f"git clone -q {ROOT} {stranger.clone}", where=Path(folder))
            follow(stranger, " ".join(options.make_argument), options.tests)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = str(error)
    for what, seconds, said in stranger.rows:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        print(f"{seconds:7.1f} s  {' '.join(what.split())[:70]:70}  {last.strip()[:70]}")
    print(f"{sum(seconds for _, seconds, _ in stranger.rows):7.1f} s  together")
    print(failed, end="")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
