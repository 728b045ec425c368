"""Scenarios with real processes, Redis and HTTP: what a person does to a cluster, and what may happen to it."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import httpx
import psutil
import pytest
from parts import SteadyLoad
from waiting import PATIENCE_S, is_gone, wait_until

from real_cluster import HASTY, RealCluster
from tandem.deploy.cli import main
from tiny_models import check_greedy, random_prompt, tiny_model

HONEST = {429, 499, 500, 502, 503, 504}
PROMPTS = [random_prompt(length, seed=length) for length in (5, 33, 64, 150, 333)]


def check(prompt: list[int], samples: list[list[int]], num_tokens: int = 32) -> None:
    for token_ids in samples:
        check_greedy(tiny_model("llama"), prompt, token_ids, num_tokens)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    with RealCluster(tiny_model("llama"), "--prefill", "1", "--decode", "1", *HASTY) as running:
        running.wait_until_ready(2)
        yield running


def pools_mapped_by(pid: int) -> set[str]:
    """Inodes of the KV pools that a process has in its address space."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:tandem-kv-pool" in line}


class Load:
    """Requests under way in threads; each ends in its tokens or an honest error."""

    def __init__(self, cluster: RealCluster, number: int, num_tokens: int = 100) -> None:
        self._cluster = cluster
        self._num_tokens = num_tokens
        self._pool = ThreadPoolExecutor(number)
        self._prompts = [random_prompt(40 + 7 * index, seed=900 + index) for index in range(number)]
        self._answers: list[Future[httpx.Response]] = [self._pool.submit(self._one, p) for p in self._prompts]

    def _one(self, prompt: list[int]) -> httpx.Response:
        body = {
            "model": self._cluster.model,
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return httpx.post(self._cluster.url + "/v1/completions", json=body, timeout=2 * PATIENCE_S)

    def check(self, may_break: bool = False) -> tuple[int, int]:
        """(results, errors). `may_break`: the router itself was hurt, so connections may end without an answer."""
        results = errors = 0
        for prompt, answer in zip(self._prompts, self._answers, strict=True):
            try:
                response = answer.result(2 * PATIENCE_S)
            except httpx.TransportError:
                assert may_break, "a connection ended without an answer"
                errors += 1
                continue
            if response.status_code == 200:
                check(prompt, [response.json()["choices"][0]["token_ids"]], self._num_tokens)
                results += 1
            else:
                assert response.status_code in HONEST, response.text
                assert response.json()["error"]["message"]
                errors += 1
        self._pool.shutdown()
        return results, errors


# README says: "a local cluster: 2 prefill, 1 decode, router, Redis"
def test_one_plus_one_hands_over(cluster: RealCluster) -> None:
    before = cluster.counter("sink_commits")
    for prompt in PROMPTS:
        check(prompt, cluster.tokens(prompt, 32))
    wait_until(lambda: cluster.counter("sink_commits") > before, "the nodes to report")
    cluster.wait_until_whole()


def test_four_samples_of_one_prompt(cluster: RealCluster) -> None:
    prompt = random_prompt(100, seed=41)
    four = cluster.tokens(prompt, 32, n=4)
    assert len(four) == 4
    check(prompt, four)
    seeded = {"temperature": 0.8, "seed": 11, "n": 4}
    first = cluster.tokens(prompt, 24, **seeded)
    assert cluster.tokens(prompt, 24, **seeded) == first
    assert len({tuple(tokens) for tokens in first}) > 1
    cluster.wait_until_whole()


def test_a_prefix_is_found_on_the_decode_node(cluster: RealCluster) -> None:
    prompt = random_prompt(200, seed=42)
    check(prompt, cluster.tokens(prompt, 16), 16)
    answer = cluster.complete(prompt, max_tokens=16).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 176
    check(prompt, [answer["choices"][0]["token_ids"]], 16)


def test_both_nodes_are_profiled(cluster: RealCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SteadyLoad(cluster.url, tiny_model("llama"), num_clients=2):
        assert main(["profile", cluster.url, "--seconds", "1", "--steps", "20", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [report["role"] for report in reports] == ["decode", "prefill"]
    for report in reports:
        assert f"{report['node_id']} ({report['role']}, cpu)" in said
        for ending in (".svg", ".trace.json.gz"):
            assert (tmp_path / (report["node_id"] + ending)).stat().st_size > 0
        ElementTree.parse(tmp_path / f"{report['node_id']}.svg")
    assert reports[0]["steps"] > 0
    assert reports[0]["layers"]


# README says: "OpenAI-style HTTP requests"
def test_the_openai_client_works(cluster: RealCluster) -> None:
    import openai

    client = openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)
    whole = client.completions.create(model=cluster.model, prompt="def f(x):", max_tokens=20, temperature=0)
    parts = client.completions.create(
        model=cluster.model,
        prompt="def f(x):",
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(parts)
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    assert [model.id for model in client.models.list()] == [cluster.model]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_bad_requests_leave_nothing_behind(cluster: RealCluster) -> None:
    cluster.wait_until_whole()
    for field, value in (("temperature", -1), ("n", 0), ("max_tokens", 1 << 20), ("prompt", [99999]), ("prompt", [])):
        answer = cluster.complete(**{"prompt": [5], field: value})  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text
        assert field in (answer.json()["error"]["param"] or ""), answer.text
    time.sleep(0.5)  # node reports are that old at most
    assert cluster.used_blocks() == 0


def test_a_client_that_leaves_frees_its_blocks(cluster: RealCluster) -> None:
    body = {"model": cluster.model, "prompt": random_prompt(120, seed=3), "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", cluster.url + "/v1/completions", json={**body, "ignore_eos": True}) as stream:
        for _ in zip(range(3), stream.iter_lines(), strict=False):
            pass
    cluster.wait_until_whole()


@pytest.mark.parametrize("way", [pytest.param("stop", marks=pytest.mark.slow), "kill"])
def test_redis_may_go_and_come(cluster: RealCluster, way: str) -> None:
    redis = []
    for child in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # some live for a moment only
            redis += [child] * ("redis" in child.name())
    assert redis, "the cluster runs without Redis"
    load = Load(cluster, 6, num_tokens=40)
    if way == "stop":
        redis[0].suspend()
        time.sleep(2)
        assert load.check() == (6, 0)
        redis[0].resume()
    else:
        redis[0].kill()
        assert load.check() == (6, 0)
    assert Load(cluster, 4, num_tokens=20).check() == (4, 0)
    cluster.wait_until_whole()


# README says: "Every accepted request ends once"
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("decode", signal.SIGKILL, id="decode-kill"),
        pytest.param("prefill", signal.SIGSTOP, id="prefill-stop"),
        pytest.param("router", signal.SIGKILL, id="router-kill"),
        pytest.param("decode", signal.SIGSTOP, id="decode-stop", marks=pytest.mark.slow),
        pytest.param("prefill", signal.SIGKILL, id="prefill-kill", marks=pytest.mark.slow),
        pytest.param("router", signal.SIGSTOP, id="router-stop", marks=pytest.mark.slow),
    ],
)
def test_a_process_dies_under_load(cluster: RealCluster, victim: str, number: int) -> None:
    prefill, pid = cluster.pid_of("prefill"), cluster.pid_of(victim)
    lost = "" if victim == "router" else cluster.node_of(pid)
    load = Load(cluster, 12)
    time.sleep(0.4)
    cluster.kill(victim, number)
    results, errors = load.check(may_break=victim == "router")
    assert results + errors == 12
    wait_until(lambda: is_gone(pid), "its end: one that was stopped is given up only later")
    cluster.wait_until_ready(2, without=lost)
    check(PROMPTS[3], cluster.tokens(PROMPTS[3], 32))
    cluster.wait_until_whole()
    if victim == "decode":
        wait_until(
            lambda: len(pools_mapped_by(prefill)) == 2,
            "its own and the living decode node's alone: a dead one's memory is given back",
        )


def test_a_bad_folder_ends_it_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    cluster = RealCluster(tmp_path)
    assert cluster.process.wait(PATIENCE_S) != 0
    assert "GPT2LMHeadModel" in cluster.log()
    assert "config.json" in cluster.log()
