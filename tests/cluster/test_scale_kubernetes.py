"""`tandem scale` beside a real router and real nodes: what starts and ends them in place of Kubernetes is this test."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from kubernetes_api import TOKEN, KubernetesApi
from parts import Part, Parts
from waiting import PATIENCE_S, wait_until

from redis_process import running_redis
from tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Pods:
    """Has as many nodes of each role as their Deployment asks for, as Kubernetes would; SIGTERM ends one."""

    def __init__(self, api: KubernetesApi, parts: Parts) -> None:
        self._api, self._parts = api, parts
        self._nodes: dict[str, list[Part]] = {name: [] for name in api.replicas}
        self.ended: list[Part] = []

    def follow(self) -> dict[str, int]:
        for name, nodes in self._nodes.items():
            while len(nodes) < self._api.replicas[name]:
                nodes.append(self._parts.start(name.removeprefix("tandem-")))
            while len(nodes) > self._api.replicas[name]:
                self.ended.append(nodes.pop())
                self.ended[-1].terminate()
            for node in nodes:
                node.look()
        return {name: len(nodes) for name, nodes in self._nodes.items()}


def test_a_request_that_waits_at_the_router_brings_pools_back_and_idle_ones_go(tmp_path: Path) -> None:
    model, token = tiny_model("llama"), tmp_path / "token"
    token.write_text(TOKEN)
    names = ("tandem-prefill", "tandem-decode")
    with (
        running_redis() as redis,
        Parts(model, redis.url) as parts,
        KubernetesApi(dict.fromkeys(names, 0)).answering() as api,
        ThreadPoolExecutor(1) as client,
    ):
        url = f"http://127.0.0.1:{parts.start('router', '--node-wait-s=300').wait_ready()['port']}"
        pods = Pods(api, parts)
        pools = [f"--pool={name.removeprefix('tandem-')}={name}:0:2" for name in names]
        where = [f"--url={url}", f"--api-server={api.url}", "--namespace=llm", f"--token-file={token}"]
        command = [sys.executable, "-m", "tandem.deploy.cli", "scale", *where, *pools, "--idle-s=1", "--every-s=0.2"]

        def wait(until: Callable[[], bool], what: str) -> None:
            wait_until(lambda: (pods.follow(), until())[1], what, 4 * PATIENCE_S)

        scaler = subprocess.Popen(command)
        try:
            for _ in range(2):  # back from zero, where it was before, too
                body = {"prompt": [5] * 40, "max_tokens": 4, "ignore_eos": True}
                asked = client.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=300)
                wait(asked.done, "an answer")
                assert asked.result().status_code == 200, asked.result().text
                assert asked.result().json()["usage"]["completion_tokens"] == 4
                wait(lambda: not any(pods.follow().values()), "idle pools to go")
                assert [node.wait_end() for node in pods.ended] == [0] * len(pods.ended)
            assert {node.name for node in pods.ended} == {"prefill", "decode"}
        finally:
            scaler.send_signal(signal.SIGTERM)
            assert scaler.wait(PATIENCE_S) == 0
