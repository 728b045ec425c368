"""The commands of the pages as they stand there, on the demo model: other hosts are this one, other models that one.

Whatever is fenced as shell runs, but for what fakes/documented.py names with a reason; so do the programs in Python.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from documented import DEMO, Block, blocks, programs, why_not_run
from tiny_adapters import tiny_adapter
from waiting import PATIENCE_S, is_gone, wait_until, wait_until_gone

from real_cluster import RealCluster
from redis_process import running_redis
from tandem.deploy.redis_server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")]
START_S = 4 * PATIENCE_S
SERVERS = ("serve", "prefill", "decode", "router")
# Small and quick to start, said where no command line is changed by it.
SETTINGS = {"TANDEM_NUM_BLOCKS": "256", "TANDEM_DEVICE": "cpu", "TANDEM_NUM_THREADS": "1"}
# One host stands for all: a name or an address there is a loopback address here.
HOSTS = {
    "10.0.0.1": "127.0.0.1",
    "10.0.0.2": "127.0.0.2",
    "gpu1": "127.0.0.1",
    "gpu2": "127.0.0.2",
    "door": "127.0.0.3",
}
REMOTE = {
    "tandem": 'echo $$ >> "$STAGE/pids"; exec {python} -m tandem.deploy.cli "$@"',
    "ssh": 'mkdir -p "$STAGE/$1" && cd "$STAGE/$1" && exec env -u TANDEM_PORT sh -c "$2"',
    "scp": 'shift; mkdir -p "$STAGE/${{2%:}}" && cp -p "$1" "$STAGE/${{2%:}}"',
}


_STAGES: list[Stage] = []


@pytest.fixture(autouse=True)
def _clear_stages() -> Iterator[None]:
    yield
    for stage in _STAGES:
        stage.clear()


class Stage:
    """A folder in which a reader types; `port` is what stands for 8000, `redis` what stands for 10.0.0.9."""

    def __init__(self, folder: Path, port: int, redis: str = "127.0.0.1") -> None:
        self.folder = folder
        self.port = port
        self._programs = folder / "bin"
        self._programs.mkdir(parents=True)
        for name, text in REMOTE.items():
            (self._programs / name).write_text(f"#!/bin/sh\n{text.format(python=sys.executable)}\n")
            (self._programs / name).chmod(0o755)
        self._model = make_model(folder / "model")
        for name in ("sql", "chat", "law"):
            tiny_adapter(folder / "adapters" / name, DEMO, seed=len(name), targets=("q_proj",))
        self._control_port = str(free_port())
        self._redis = redis
        self._started: list[subprocess.Popen[bytes]] = []
        _STAGES.append(self)

    def meant(self, text: str) -> str:
        """What is typed here for what stands in a page."""
        text = re.sub(r"/models/[\w.-]+|\bMODEL\b", str(self._model), text)
        text = text.replace("/adapters/", f"{self.folder}/adapters/").replace(".venv/bin/tandem", "tandem")
        text = text.replace(". .venv/bin/activate", "true").replace("10.0.0.9", self._redis)
        for host, here in HOSTS.items():
            text = re.sub(rf"\b{re.escape(host)}\b", here, text)
        text = re.sub(r"\b(localhost|router|HOST):8000\b", f"127.0.0.1:{self.port}", text)
        return re.sub(r"\b8000\b", str(self.port), text).replace("7001", self._control_port)

    def start(self, text: str) -> subprocess.Popen[bytes]:
        path = f"{self._programs}:{os.environ['PATH']}"
        settings = {
            **os.environ,
            **SETTINGS,
            "PATH": path,
            "STAGE": str(self.folder),
            "TANDEM_PORT": str(self.port),
            "TANDEM_URL": f"http://127.0.0.1:{self.port}",
        }
        if re.match(r"tandem (prefill|decode) ", text):
            del settings["TANDEM_PORT"]
        with (self.folder / "said").open("ab") as said:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", self.meant(text)],
                cwd=self.folder, env=settings, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        self._started.append(process)
        return process

    def clear(self) -> None:
        """What a test that failed left behind ends at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()

    def run(self, text: str) -> str:
        """What it printed. It must end well."""
        before = len(self.said())
        ended = self.start(text).wait(START_S)
        said = self.said()[before:]
        assert ended == 0, f"{text}\n{said}"
        return said

    def said(self) -> str:
        file = self.folder / "said"
        return file.read_text(errors="replace") if file.exists() else ""

    def ask(self) -> None:
        """Whoever serves on the stage's port answers, sooner or later."""
        url = f"http://127.0.0.1:{self.port}"

        def is_ready() -> bool:
            try:
                return httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(lambda: is_ready() or not self.pids(), "the server", START_S)
        assert self.pids(), self.said()
        body = {"prompt": "def read_lines(path):" * 20, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text + self.said()

    def pids(self) -> list[int]:
        """`tandem` processes of this stage that run."""
        file = self.folder / "pids"
        pids = [int(line) for line in file.read_text().split()] if file.exists() else []
        return [pid for pid in pids if not is_gone(pid)]

    def stop(self) -> None:
        """The newest first: a router drains before its nodes."""
        for pid in reversed(self.pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            wait_until_gone(pid)


def make_model(folder: Path) -> Path:
    """The demo model, with a length that the pages' options ask for."""
    folder.mkdir()
    for path in DEMO.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """What the quickstart starts: a split cluster of the demo model. It takes adapters, too."""
    with RealCluster(DEMO, "--prefill", "1", "--decode", "1", "--enable-lora") as running:
        stage = Stage(tmp_path_factory.mktemp("asks") / "stage", running.port)
        yield stage


def kept(block: Block) -> list[str]:
    return [line for line in block.lines if not why_not_run(block.page, line)]


def starts_servers(line: str) -> bool:
    return any(call[0] == "tandem" and call[1:2] and call[1] in SERVERS for call in programs(line))


def named(found: list[Block]) -> list:
    return [pytest.param(block, id=f"{block.page}: {kept(block)[0][:40]}") for block in found]


RUN = [block for block in blocks("sh") if kept(block)]
HOSTED = [block for block in RUN if "ssh" in block.text]
PARTS = [block for block in RUN if any("--redis-url" in line for line in kept(block))]
SERVED = [block for block in RUN if any(map(starts_servers, kept(block))) and block not in PARTS]
ASKED = [block for block in RUN if block not in (*HOSTED, *PARTS, *SERVED)]


@pytest.mark.parametrize("block", named(ASKED))
def test_what_asks_a_server(block: Block, cluster: Stage) -> None:
    (cluster.folder / "router.log").write_text("".join(LOGGED.format(n=n) for n in range(20)))
    said = cluster.run("\n".join(kept(block)))
    assert '"error"' not in said
    assert said.strip()


LOGGED = (
    '{{"time": "2026-01-01 00:00:{n:02}.000", "logger": "tandem.requests", "status": 200, "prompt_tokens": 300, '
    '"cached_tokens": 0, "output_tokens": 20, "duration_s": 1.0, "prompts": 1}}\n'
)


@pytest.mark.parametrize("block", named(SERVED))
def test_what_starts_a_server(block: Block, tmp_path: Path) -> None:
    for line in kept(block):
        stage = Stage(tmp_path / f"{len(list(tmp_path.iterdir()))}", free_port())
        if not starts_servers(line):
            assert stage.run(line) or line == ". .venv/bin/activate"
            continue
        process = stage.start(line)
        stage.ask()
        stage.stop()
        assert process.wait(START_S) == 0, stage.said()
        assert "serving" in stage.said()


@pytest.mark.parametrize("block", named([*PARTS, *HOSTED]))
def test_what_starts_the_parts_on_machines_of_their_own(block: Block, tmp_path: Path) -> None:
    with running_redis() as redis:
        stage = Stage(tmp_path / "stage", free_port(), redis.url.removeprefix("redis://"))
        if block in HOSTED:
            stage.run("\n".join(kept(block)))
        else:
            for line in kept(block):
                started = stage.start(line)
                assert starts_servers(line) or started.wait(PATIENCE_S) == 0
        wait_until(lambda: len(stage.pids()) == 3, "all three")
        stage.ask()
        stage.stop()


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/from_vllm.md"])
def test_programs_in_python(page: str, cluster: Stage, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {}
    for block in blocks("python", page):
        text = "\n".join(line for line in block.text.splitlines() if not line.endswith("# before"))
        text = cluster.meant(text).replace("Qwen3-8B", "demo_model")
        run = compile(text, page, "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if run.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(run, names))
        else:
            exec(run, names)
        assert capsys.readouterr().out.strip() or "print" not in text
