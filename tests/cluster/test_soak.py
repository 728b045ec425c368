"""Nodes are killed, stopped and drained at random moments under load: greedy tokens equal the undisturbed run, every
request ends in a result or an honest error, and the pools come back whole.

SOAK_MOMENTS (200) says how many moments, SOAK_SEED which ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter

import httpx
import psutil
import pytest

from real_cluster import RealCluster
from tiny_models import random_prompt, reference_greedy, tiny_model

NUM_MOMENTS = int(os.environ.get("SOAK_MOMENTS", "200"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
NUM_CLIENTS = 6
HONEST = {429, 499, 500, 502, 503, 504}
REQUESTS = [(random_prompt(length, seed=length), num_tokens) for length, num_tokens in
            ((5, 120), (33, 200), (70, 60), (100, 250), (180, 150), (333, 100))]  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


class Load:
    """Clients that ask for one of REQUESTS after the other until `stop`; `wrong` is what broke a promise."""

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster
        self._stopping = threading.Event()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request did not end"

    def _run(self, number: int) -> None:
        rng = random.Random(SEED * 1000 + number)
        with httpx.Client(base_url=self._cluster.url, timeout=90) as client:
            while not self._stopping.is_set():
                prompt, num_tokens = rng.choice(REQUESTS)
                num_samples, streams = rng.choice((1, 1, 2, 4)), rng.random() < 0.7
                try:
                    end = self._one(client, prompt, num_tokens, num_samples, streams)
                except Exception as error:  # whatever it is, the campaign must say so
                    end = "broken"
                    self.wrong.append(repr(error))
                self.ends[end] += 1
                if end != "result":
                    time.sleep(0.2)

    def _one(self, client: httpx.Client, prompt: list[int], num_tokens: int, num_samples: int, streams: bool) -> str:
        body = {
            "model": self._cluster.model, "prompt": prompt, "max_tokens": num_tokens, "n": num_samples,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": streams,
        }  # fmt: skip
        tokens: dict[int, list[int]] = {}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(answer.read())["error"]
                assert answer.status_code in HONEST, error
                assert error["message"]
                return "error"
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        for event in [json.loads(line) for line in lines if line != "[DONE]"]:
            if "error" in event:
                assert event["error"]["message"]
                return "error while streaming"
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        expected = reference_greedy(tiny_model("llama"), prompt, num_tokens).token_ids
        assert tokens == dict.fromkeys(range(num_samples), expected), "tokens differ"
        return "result"


@pytest.mark.slow
def test_nodes_that_go_at_random_moments_change_no_token() -> None:
    rng = random.Random(SEED)
    for prompt, num_tokens in REQUESTS:
        reference_greedy(tiny_model("llama"), prompt, num_tokens)
    with RealCluster(tiny_model("llama"), "--prefill", "1", "--decode", "2", "--rebalance-kv", "0.2") as cluster:
        cluster.wait_until_ready(3)
        load = Load(cluster)
        for moment in range(NUM_MOMENTS):
            time.sleep(rng.random() * 2)
            role, number = rng.choice(("decode", "decode", "prefill")), rng.choice(SIGNALS)
            index = rng.randrange(2) if role == "decode" else 0
            print(moment, role, index, number.name, dict(load.ends), flush=True)
            if cluster.num_nodes() < 3 and number is signal.SIGSTOP:
                number = signal.SIGKILL  # one that stops while it starts is given up only after minutes
            try:
                pid = cluster.pid_of(role, index)
                cluster.send(pid, number)
            except (IndexError, psutil.NoSuchProcess):
                continue  # it is about to be started again
            if rng.random() < 0.7:  # the others are hurt while it is away
                cluster.wait_until_gone(pid, 90)
                cluster.wait_until_ready(3, timeout_s=90)
            else:
                cluster.wait_until_ready(timeout_s=90)
            assert not load.wrong, load.wrong
        load.stop()
        print(dict(load.ends), cluster.router_metric("migration_pause_s_count"), "sequences moved")
        assert not load.wrong, load.wrong
        assert load.ends["result"] > load.ends["error"] + load.ends["error while streaming"]
        cluster.wait_until_ready(3, timeout_s=90)
        cluster.wait_until_whole()
