"""`tandem serve` as a person runs it, in processes of its own, with handles to hurt them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
from waiting import PATIENCE_S, wait_until

from tandem.deploy.redis_server import free_port
from tandem.router.metrics.catalog import UNKNOWN
from tandem.router.metrics.nodes import read_nodes

TINY = ("--block-size", "16", "--hash-block-size", "16", "--num-blocks", "256", "--num-threads", "1")
# A node computes its largest step before it serves.
SMALL_STEPS = ("--max-num-batched-tokens", "512")
EAGER = ("--local-tail-tokens", "0", "--heartbeat-s", "0.2", "--peer-lost-s", "20")
HASTY = ("--peer-lost-s", "3")  # where a process that is stopped is to be given up


class RealCluster:
    """Context manager around one `tandem serve`. Prompts longer than a block are handed over, never computed twice."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        start_s: float = 2 * PATIENCE_S,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`log`: a file for what the processes say, kept; `environment`: variables beside those of this process."""
        self._start_s = start_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = model.name
        self._log = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115
        command = [sys.executable, "-m", "tandem.deploy.cli", "serve", str(model), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *TINY, *SMALL_STEPS, *EAGER, *arguments],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
        )
        self.client = httpx.Client(base_url=self.url, timeout=2 * PATIENCE_S)

    def __enter__(self) -> RealCluster:
        self.wait_until_ready(within_s=self._start_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.client.close()
        if kind is not None:
            print(self.log()[-20000:])  # a test that failed says what the processes said
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_until_ready(self, num_nodes: int = 0, within_s: float = 2 * PATIENCE_S, without: str = "") -> None:
        """The router can use `num_nodes` nodes, and none of them is the one called `without`."""
        deadline = time.monotonic() + within_s
        said = "nothing"
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"tandem serve ended: {self.log()}"
            try:
                answer = self.client.get("/ready")
                said = answer.text
                nodes = [node["node_id"] for node in answer.json()["nodes"]] if answer.status_code == 200 else None
                if nodes is not None and len(nodes) >= num_nodes and without not in nodes:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready, {said}: {self.log()}")

    def num_nodes(self) -> int:
        """That the router can use now."""
        answer = self.client.get("/ready")
        return len(answer.json()["nodes"]) if answer.status_code == 200 else 0

    def complete(self, prompt: list[int], **fields: object) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.client.post("/v1/completions", json={**body, **fields})

    def tokens(self, prompt: list[int], num_tokens: int, **fields: object) -> list[list[int]]:
        answer = self.complete(prompt, max_tokens=num_tokens, **fields)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    def pid_of(self, kind: str, index: int = 0) -> int:
        """Process of the index-th child that runs `tandem <kind>`."""
        pids = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # some live for a moment only
                if kind in child.cmdline():
                    pids.append(child.pid)
        return sorted(pids)[index]

    def pid_of_node(self, node_id: str) -> int:
        """Process of the node that the router knows by this name."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"--node-id={node_id}" in child.cmdline():
                    return child.pid
        raise AssertionError(f"no process of {node_id}")

    @staticmethod
    def node_of(pid: int) -> str:
        """Name by which the router knows the node of this process."""
        option = "--node-id="
        return next(part.removeprefix(option) for part in psutil.Process(pid).cmdline() if part.startswith(option))

    @staticmethod
    def send(pid: int, number: int) -> None:
        psutil.Process(pid).send_signal(number)

    def kill(self, kind: str, number: int = signal.SIGKILL) -> None:
        psutil.Process(self.pid_of(kind)).send_signal(number)

    def counter(self, name: str) -> float:
        """Sum of a counter over all nodes."""
        nodes = read_nodes(self.metrics()).values()
        assert all(name in node.figures for node in nodes), f"no node reports {name}"
        return sum(node.figures[name] for node in nodes)

    def by_node(self, name: str, role: str) -> dict[str, float]:
        """A figure of each node of that role, by the node's id."""
        return {node: of.figures[name] for node, of in read_nodes(self.metrics()).items() if of.role == role}

    def router_metric(self, name: str) -> float:
        """A counter or histogram part of the router: its sum over labels."""
        lines = re.findall(rf"^tandem_router_{name}(?:{{.*}})? (.+)$", self.metrics(), re.MULTILINE)
        return sum(map(float, lines))

    def metrics(self) -> str:
        text = self.client.get("/metrics").text
        assert UNKNOWN not in text, "a node reports what router/metrics/catalog.py does not list"
        return text

    def used_blocks(self) -> float:
        """Blocks that are not free, over all nodes that the router knows."""
        nodes = read_nodes(self.metrics()).values()
        assert nodes, "the router shows no node"
        return sum(node.figures["num_blocks"] - node.figures["num_free_blocks"] for node in nodes)

    def wait_until_whole(self, within_s: float = PATIENCE_S) -> None:
        wait_until(lambda: self.used_blocks() == 0, "every block to be free again", within_s)
