"""Real processes: streams go on while their decode node drains or dies, and the node that takes them dies, too."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from real_cluster import RealCluster
from tiny_models import random_prompt, reference_greedy, tiny_model

LENGTH = 400
SEEDED = {"temperature": 0.8, "seed": 77, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    with RealCluster(tiny_model("llama"), "--prefill", "1", "--decode", "2") as running:
        running.wait_until_ready(3)
        yield running


class Stream:
    """One streaming request on a thread: token ids of each sample in the order in which they came, and their times."""

    def __init__(self, cluster: RealCluster, prompt: list[int], num_tokens: int = LENGTH, **fields: object) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.times: list[float] = []
        self.error: dict[str, object] = {}
        self.ends: dict[int, str] = {}
        body = {
            "model": cluster.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True, **fields,
        }  # fmt: skip
        self.is_stopped = False
        self._done: Future[None] = ThreadPoolExecutor(1).submit(self._read, cluster.url, body)

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=90) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if self.is_stopped or line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict) -> None:
        self.error = event.get("error", self.error)
        self.times.append(time.monotonic())
        for choice in event.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                self.ends[choice["index"]] = choice["finish_reason"]

    def wait_for(self, num_tokens: int, num_samples: int = 1) -> None:
        deadline = time.monotonic() + 30
        while len(self.tokens) < num_samples or min(map(len, self.tokens.values())) < num_tokens:
            assert time.monotonic() < deadline, "no tokens"
            assert not self._done.done(), self._done.result()
            time.sleep(0.01)

    def finish(self) -> dict[int, list[int]]:
        self._done.result(90)
        assert not self.error, self.error
        return self.tokens

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def expected(prompt: list[int], num_tokens: int = LENGTH) -> list[int]:
    return reference_greedy(tiny_model("llama"), prompt, num_tokens).token_ids


def decoders_by_load(cluster: RealCluster) -> list[int]:
    """Processes of the decode nodes, the one with the most running sequences first."""
    time.sleep(0.3)  # a heartbeat
    running = cluster.by_node("num_running", "decode")
    return [cluster.pid_of_node(node) for node in sorted(running, key=lambda node: -running[node])]


def test_a_draining_node_gives_its_streams_away(cluster: RealCluster) -> None:
    prompt = random_prompt(100, seed=61)
    alone = Stream(cluster, prompt, **SEEDED).finish()
    four = Stream(cluster, random_prompt(90, seed=62), n=4, **SEEDED).finish()
    cluster.wait_until_whole()
    before = cluster.router_metric("migration_pause_s_count")
    streams = [Stream(cluster, random_prompt(80 + 10 * i, seed=63 + i)) for i in range(3)]
    streams += [Stream(cluster, prompt, **SEEDED), Stream(cluster, random_prompt(90, seed=62), n=4, **SEEDED)]
    for stream in streams:
        stream.wait_for(20)
    victim, _ = decoders_by_load(cluster)
    cluster.send(victim, signal.SIGTERM)
    cluster.wait_until_gone(victim, 15)
    assert not all(stream.ends for stream in streams), "they ended before the node did: this test shows nothing"
    results = [stream.finish() for stream in streams]
    for i, result in enumerate(results[:3]):
        assert result == {0: expected(random_prompt(80 + 10 * i, seed=63 + i))}
    assert results[3:] == [alone, four]
    assert cluster.router_metric("migration_pause_s_count") > before
    assert max(stream.longest_gap_s for stream in streams) < 5
    cluster.wait_until_ready(3)
    cluster.wait_until_whole()
