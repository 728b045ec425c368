"""Nodes that are hurt at random moments while clients ask: what both the CPU's and the GPUs' campaign are made of."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import psutil
from waiting import PATIENCE_S, wait_until_gone

from real_cluster import RealCluster

HONEST = {429, 499, 500, 502, 503, 504}
NUM_CLIENTS = 6
PAUSE = "PAUSE"  # stopped and continued before anybody gives it up, or just after
HURTS = (signal.SIGKILL.name, signal.SIGSTOP.name, signal.SIGTERM.name, PAUSE)


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    num_tokens: int


Check = Callable[[Ask, list[int]], None]  # raises AssertionError that says what is wrong with the tokens


class Load:
    """Clients that ask one of `asks` after the other until `stop`; `wrong` is what broke a promise."""

    def __init__(self, cluster: RealCluster, asks: list[Ask], check: Check, seed: int) -> None:
        self._cluster, self._asks, self._check, self._seed = cluster, asks, check, seed
        self._stopping = threading.Event()
        self.ends: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), "a request did not end"

    def _run(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        with httpx.Client(base_url=self._cluster.url, timeout=2 * PATIENCE_S) as client:
            while not self._stopping.is_set():
                ask, num_samples, streams = rng.choice(self._asks), rng.choice((1, 1, 2, 4)), rng.random() < 0.7
                try:
                    end = self._one(client, ask, num_samples, streams)
                except Exception as error:  # whatever it is, the campaign must say so
                    end = "broken"
                    self.wrong.append(repr(error))
                self.ends[end] += 1
                if end != "result":
                    time.sleep(0.2)

    def _one(self, client: httpx.Client, ask: Ask, num_samples: int, streams: bool) -> str:
        body = {
            "model": self._cluster.model, "prompt": list(ask.prompt), "max_tokens": ask.num_tokens, "n": num_samples,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": streams,
        }  # fmt: skip
        tokens: dict[int, list[int]] = {}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return self._honest(json.loads(answer.read())["error"], answer.status_code)
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        for event in [json.loads(line) for line in lines if line != "[DONE]"]:
            if "error" in event:
                return self._honest(event["error"], 0)
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert sorted(tokens) == list(range(num_samples)), f"samples {sorted(tokens)} of {num_samples}"
        for sample in tokens.values():
            assert len(sample) == ask.num_tokens, f"{len(sample)} tokens of {ask.num_tokens}"
            self._check(ask, sample)
        return "result"

    def _honest(self, error: dict[str, str], status: int) -> str:
        assert not status or status in HONEST, (status, error)
        assert error["message"]
        self.errors[f"{status or 'streaming'}: {re.sub('[0-9.]+', '#', error['message'])}"] += 1
        return "error" if status else "error while streaming"


@dataclass
class Campaign:
    """Hurts nodes of a cluster under load. `roles`: (role, how many of it there are), twice if it is hurt more."""

    cluster: RealCluster
    load: Load
    rng: random.Random
    roles: tuple[tuple[str, int], ...]
    restart_s: float = 90.0
    patience: float = 0.7  # how often the hurt node's successor is awaited before the next one is hurt
    num_moments: int = 0
    hurts: Counter[str] = field(default_factory=Counter)

    @property
    def num_nodes(self) -> int:
        return sum(dict(self.roles).values())

    def moment(self) -> None:
        """Waits up to two seconds, hurts a node, and sees that the cluster comes back."""
        time.sleep(self.rng.random() * 2)
        role, count = self.rng.choice(self.roles)
        index, how = self.rng.randrange(count), self.rng.choice(HURTS)
        if self.cluster.num_nodes() < self.num_nodes and how == signal.SIGSTOP.name:
            how = signal.SIGKILL.name  # one that stops while it starts is given up only after minutes
        print(self.num_moments, role, index, how, dict(self.load.ends), flush=True)
        self.num_moments += 1
        try:
            pid = self.cluster.pid_of(role, index)
            node_id = self.cluster.node_of(pid)
            self._hurt(pid, how)
        except (IndexError, StopIteration, psutil.NoSuchProcess):
            return  # it is about to be started again
        self.hurts[f"{role} {how}"] += 1
        if how == PAUSE:
            self.cluster.wait_until_ready(within_s=self.restart_s)
        elif self.rng.random() < self.patience:
            wait_until_gone(pid)
            self.cluster.wait_until_ready(self.num_nodes, within_s=self.restart_s, without=node_id)
        else:
            self.cluster.wait_until_ready(within_s=self.restart_s)
        assert not self.load.wrong, self.load.wrong

    def _hurt(self, pid: int, how: str) -> None:
        if how != PAUSE:
            self.cluster.send(pid, signal.Signals[how])
            return
        self.cluster.send(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * 4)
        self.cluster.send(pid, signal.SIGCONT)

    def end(self) -> None:
        """Every request has ended, some with results, and every pool is whole."""
        self.load.stop()
        print(self.num_moments, "moments:", dict(self.hurts), dict(self.load.ends))
        for message, count in self.load.errors.most_common():
            print(f"{count:5} {message}")
        assert not self.load.wrong, self.load.wrong
        assert self.load.ends["result"], "nothing was served between the moments"
        self.cluster.wait_until_ready(self.num_nodes, within_s=self.restart_s)
        self.cluster.wait_until_whole()
        moved = self.cluster.router_metric("migration_pause_seconds_count")
        pulled, restored = self.cluster.counter("pull_completed"), self.cluster.counter("tier_loaded_bytes")
        print(f"since each node's last start: {moved:g} sequences moved, {pulled:g} pulls, {restored:g} bytes restored")
