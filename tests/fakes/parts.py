"""A cluster started by parts, as on several hosts: prefill nodes, decode nodes and routers, each by itself."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from waiting import PATIENCE_S, wait_until

from tandem.deploy.launch.child_process import ChildProcess
from tandem.deploy.launch.cluster_plan import PROGRAM
from tiny_models import check_greedy, random_prompt

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--block-size=16", "--hash-block-size=16", "--num-blocks=256", "--num-threads=1")
QUICK = ("--heartbeat-s=0.2", "--peer-lost-s=20", "--log-format=plain")


def build_of(folder: Path, version: str, wire_version: int = 0) -> dict[str, str]:
    """Copies this tree as another version of the package, and returns the environment of its processes."""
    for wing in (ROOT / "tandem").iterdir():
        if wing.is_dir() and wing.name != "__pycache__":
            shutil.copytree(wing, folder / "tandem" / wing.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif wing.is_file():
            (folder / "tandem").mkdir(parents=True, exist_ok=True)
            shutil.copy(wing, folder / "tandem" / wing.name)
    facts = folder / f"tandem_serve-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tandem-serve\nVersion: {version}\n")
    if wire_version:
        connection = folder / "tandem/engine/contracts/wire/connection.py"
        lines = connection.read_text().splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith("WIRE_VERSION = "))
        lines[at] = f"WIRE_VERSION = {wire_version}"
        connection.write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": str(folder)}


class Part(ChildProcess):
    """One process; `lines` is what it has logged."""

    def __init__(
        self, kind: str, arguments: Sequence[str], environment: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        self.lines: list[str] = []
        self._ready: dict[str, Any] = {}
        command = [*prefix, sys.executable, "-c", PROGRAM, kind]
        super().__init__(kind, command, arguments, environment, lambda _, line: self.lines.append(line))

    def look(self) -> dict[str, Any]:
        """What it said when it was ready; {} before."""
        self.forward_output()
        for said in self.said():
            if said.keys() & {"address", "port"}:
                self._ready = said
        return self._ready

    def wait_ready(self) -> dict[str, Any]:
        def is_ready() -> bool:
            assert self.exit_code() is None, f"it ended: {self.lines}"
            return bool(self.look())

        wait_until(is_ready, f"a {self.name} to be ready", 2 * PATIENCE_S)
        return self._ready

    def wait_end(self) -> int:
        """Its exit code."""
        wait_until(lambda: (self.forward_output(), self.exit_code() is not None)[1], "its end", 2 * PATIENCE_S)
        code = self.exit_code()
        assert code is not None
        return code


class Parts:
    """Context manager around processes that find each other through one Redis."""

    def __init__(self, model: Path, redis_url: str, *arguments: str) -> None:
        self.model = model
        self._shared = (str(model), f"--redis-url={redis_url}", *QUICK, *arguments)
        self._parts: list[Part] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for part in self._parts:
            part.kill()
            part.forward_output()
            if kind is not None:
                print(part.name, part.pid, *part.lines[-40:], sep="\n    ")
            part.close()

    def start(
        self,
        kind: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Part:
        own = ("--port=0", "--workers=1", "--local-tail-tokens=0") if kind == "router" else SMALL
        part = Part(kind, [*self._shared, *own, *arguments], environment or {}, prefix)
        self._parts.append(part)
        return part


class SteadyLoad:
    """A context manager: clients who ask one request after the other, of the router at `url`, which may change. In the
    end every answer was whole and right."""

    def __init__(self, url: str, model: Path, num_clients: int = 3, num_tokens: int = 32) -> None:
        self.url, self._model, self._num_tokens = url, model, num_tokens
        self._prompts = [random_prompt(40 + 30 * index, seed=700 + index) for index in range(num_clients)]
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_clients)
        self.num_answers = 0

    def __enter__(self) -> SteadyLoad:
        self._clients = [self._pool.submit(self._ask, prompt) for prompt in self._prompts]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        made = [client.result(2 * PATIENCE_S) for client in self._clients]
        self._pool.shutdown()
        for prompt, answers in zip(self._prompts, made, strict=True):
            check_greedy(self._model, prompt, answers[0], self._num_tokens)
            assert all(answer == answers[0] for answer in answers)

    def wait_for_more(self, number: int = 6) -> None:
        end = self.num_answers + number
        wait_until(lambda: self.num_answers >= end or any(client.done() for client in self._clients), "more answers")
        assert self.num_answers >= end, "a client gave up"

    def _ask(self, prompt: list[int]) -> list[list[int]]:
        body = {
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answers: list[list[int]] = []
        while not self._stop.is_set():
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=2 * PATIENCE_S)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["token_ids"])
            self.num_answers += 1
        return answers
