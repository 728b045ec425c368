"""The router as a process: ready line, launcher heartbeats, signals, several workers, no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from router_in_thread import VOCAB_SIZE
from waiting import PATIENCE_S, wait_until, wait_until_gone

from stand_in_node import StandInNode
from tandem.engine.contracts.wire.parts import Message
from tandem.router.process import shared_folder
from tandem.router.process.main import default_workers

MAIN = """
import json, sys
from tandem.engine.contracts.config import ModelOptions, RouterOptions, Timeouts
from tandem.router.process.main import run_router
sys.modules["torch"] = sys.modules["transformers"] = None
if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    timeouts = Timeouts(heartbeat_s=0.1, peer_lost_s=20.0, connect_s=20.0, drain_s=60.0)
    model = ModelOptions(model=given.pop("model"))
    sys.exit(run_router(RouterOptions(model=model, timeouts=timeouts, port=0, **given)))
"""


@pytest.fixture
def node() -> Iterator[StandInNode]:
    node = StandInNode(vocab_size=VOCAB_SIZE).start()
    yield node
    node.stop()


class RouterProcess:
    def __init__(self, folder: Path, descriptors: int = 0, **options: Any) -> None:
        """`descriptors`: how many it may have; 0: as many as the test."""
        read_end, write_end = os.pipe()
        given = {"model": str(folder), "ready_fd": write_end, **options}
        script = folder / "main.py"
        script.write_text(MAIN)
        limit = f"ulimit -n {descriptors}; " if descriptors else ""
        self.process = subprocess.Popen(
            ["sh", "-c", f'{limit}exec "$0" "$@"', sys.executable, str(script), json.dumps(given)],
            pass_fds=[write_end],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write_end)
        self._ready = os.fdopen(read_end)

    def url(self) -> str:
        return f"http://127.0.0.1:{self.said()['port']}"

    def said(self) -> dict[str, Any]:
        """The next line down the launcher's pipe."""
        return json.loads(self._ready.readline())

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._ready.close()


def ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200


def test_one_process_from_ready_line_to_sigterm(folder: Path, node: StandInNode) -> None:
    with RouterProcess(folder, nodes=[node.address]) as router:
        url = router.url()
        wait_until(lambda: ready(url), "the router to be ready")
        assert router.said() == {"beat": 1}
        node.step_s = 0.01
        body = {"prompt": "the fox", "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            router.process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]", "a running stream is finished"
        assert router.process.wait(PATIENCE_S) == 0
        assert router.process.stderr is not None
        said = router.process.stderr.read()
        assert re.search(
            r"^\d{4}-\d\d-\d\d .* INFO tandem\.router\.nodes\.link: node .* is up at tcp:", said, re.MULTILINE
        )
        # A socket of another test, whose peer had this port before, may still knock: that is a warning.
        assert "INFO uvicorn" not in said


def test_clients_that_only_connect_leave_descriptors_for_a_node_that_restarts(folder: Path, node: StandInNode) -> None:
    other = StandInNode(vocab_size=VOCAB_SIZE).start()
    with RouterProcess(folder, descriptors=128, nodes=[node.address, other.address], workers=1) as router:
        url = router.url()
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            wait_until(lambda: client.get("/ready").status_code == 200, "the router to be ready")
            place = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
            idle = [socket.create_connection(place) for _ in range(228)]
            other.stop()
            second = StandInNode(vocab_size=VOCAB_SIZE, port=other.port).start()
            wait_until(lambda: bool(second.hellos), "the node that came again")
            node.draining = True

            def is_served() -> bool:
                return client.post("/v1/completions", json={"prompt": "the fox", "max_tokens": 2}).status_code == 200

            wait_until(lambda: is_served() and bool(second.submits), "a request on it")
            for each in idle:
                each.close()
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(PATIENCE_S) == 0
        second.stop()


def test_with_given_nodes_it_serves_while_redis_is_away(folder: Path, node: StandInNode) -> None:
    with RouterProcess(folder, nodes=[node.address], redis_url="redis://127.0.0.1:1") as router:
        url = router.url()
        wait_until(lambda: ready(url), "the router to be ready")


def test_a_folder_without_tokenizer_ends_it(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, workers=2) as router:
        _, errors = router.process.communicate(timeout=PATIENCE_S)
        assert router.process.returncode != 0
        assert "has no tokenizer.json" in errors


def workers_of(pid: int) -> set[int]:
    workers = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was killed ends while it is looked at
            if any("spawn_main" in word for word in child.cmdline()):
                workers.add(child.pid)
    return workers


def test_two_workers_share_the_port_and_are_replaced(
    folder: Path, node: StandInNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RouterProcess(folder, nodes=[node.address], workers=2) as router:
        url = router.url()
        wait_until(lambda: len(workers_of(router.process.pid)) == 2, "the second worker")
        first = workers_of(router.process.pid)
        wait_until(lambda: len({hello.info.node_id for hello in node.hellos}) == 2, "both workers at the node")
        body = {"prompt": "the fox", "max_tokens": 2}

        def completes() -> bool:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200

        assert all(completes() for _ in range(8))
        total = 'tandem_router_prompts_ended_total{outcome="finished"}'
        lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
        counted = float(next(line for line in lines if line.startswith(total)).split()[1])
        assert counted >= 8, "figures are the sum over the workers"

        def figure(name: str) -> float:
            text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
            return next(iter(re.findall(rf"^tandem_router_{name} (.+)$", text, re.M)), "")

        said, send = Counter[bytes](), node._send

        def with_garbage(peer: bytes, message: Message) -> None:
            said[peer] += 1
            if said[peer] <= 3:
                node._socket.send_multipart([peer, b"\xff"])
            send(peer, message)

        monkeypatch.setattr(node, "_send", with_garbage)
        wait_until(lambda: figure("undecodable_messages_total") == "6.0", "what each of the workers could not read")
        assert figure("nodes_known") == "1.0", "they know the same one"
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(workers_of(router.process.pid) - first) == 1, "a new worker")
        wait_until(lambda: len({hello.info.node_id for hello in node.hellos}) == 3, "its connection")
        assert all(completes() for _ in range(8)), "though the node may not have answered it yet"
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(PATIENCE_S) == 0


FIRST_ALONE = """
import time
from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.router.process.worker_group import WorkerGroup
def first_alone(options, port, router_id, seat, on_serving, on_beat):
    if seat.index == 0:
        on_serving(port)
    while True:
        on_beat()
        time.sleep(0.1)
if __name__ == "__main__":
    options = RouterOptions(model=ModelOptions(model=""), port=0, workers=2)
    WorkerGroup(options, first_alone, lambda port: print(port, flush=True)).run()
"""


def test_a_group_is_in_use_as_soon_as_one_worker_serves(tmp_path: Path) -> None:
    """Else nobody would watch its silence before the last one serves, which may be minutes later on a busy host."""
    (tmp_path / "main.py").write_text(FIRST_ALONE)
    with subprocess.Popen([sys.executable, str(tmp_path / "main.py")], stdout=subprocess.PIPE, text=True) as group:
        assert group.stdout is not None
        assert int(group.stdout.readline()) > 0
        group.kill()


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 8)])
def test_workers_follow_the_cores_unless_given(cores: int, workers: int) -> None:
    assert default_workers(cores) == workers


def test_the_next_router_removes_what_a_killed_one_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path /= 40 * "far"  # longer than a socket's address may be
    tmp_path.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "tandem-workers-link").symlink_to(folder)
    killed = RouterProcess(folder, workers=2)
    with killed:
        killed.said()
        (abandoned,) = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
        workers = workers_of(killed.process.pid)
    for worker in workers:
        wait_until_gone(worker)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, lock = shared_folder._make()  # as by another router, of this process
    with RouterProcess(folder, workers=2) as following:
        following.said()
        assert not abandoned.exists()
        following.process.send_signal(signal.SIGTERM)
        assert following.process.wait(PATIENCE_S) == 0
    os.close(lock)
    assert (folder / "tokenizer.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"tandem-workers-link", used.name}, "somebody uses it"
