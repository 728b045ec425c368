"""Nodes on GPUs are killed, stopped, drained at random moments under load: tokens are those of the undisturbed run or
leave it by near ties, every request ends in a result or an honest error, pools come back whole and as large as before.

SOAK_SECONDS (60) says how long each campaign takes, its start included, SOAK_SEED which moments.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from near_ties import widest_gap
from soak import Ask, Campaign, Load
from waiting import wait_until, wait_until_gone

import tandem.deploy
from real_cluster import HASTY, RealCluster
from tiny_models import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
ASKS = [Ask(tuple(random_prompt(length, length, vocab_size=2048)), num_tokens) for length, num_tokens in
        ((5, 300), (33, 400), (180, 200), (700, 250), (1500, 100))]  # fmt: skip
# Few graphs to capture, or none: a node that was killed is back sooner.
QUICK_START = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", *HASTY)
GRAPHS = {"float32": ("--no-cuda-graphs",), "bfloat16": ()}
# Of a GPU's memory, in the process of a peer that has mapped a pool there: one page of 2 MiB was seen.
DRIVERS_SHARE, MOST_KILLS = 0.001, 6
# A dtype's error is measured for one order of additions; two of our own orders may each be off by as much.
NUM_ERRORS = 3


class Explained:
    """Tokens that are those of the undisturbed run, or that leave it by near ties only."""

    def __init__(self, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._lock = threading.Lock()
        self._undisturbed: dict[Ask, list[int]] = {}
        self._known: set[tuple[Ask, tuple[int, ...]]] = set()
        self.num_equal = self.num_explained = 0
        self.widest = 0.0  # gap, in errors of the dtype

    def undisturbed(self, cluster: RealCluster) -> None:
        for ask in ASKS:
            (tokens,) = cluster.tokens(list(ask.prompt), ask.num_tokens)
            self._explain(ask, tokens)
            self._undisturbed[ask] = tokens

    def check(self, ask: Ask, tokens: list[int]) -> None:
        with self._lock:
            if tokens == self._undisturbed[ask]:
                self.num_equal += 1
                return
            if (ask, tuple(tokens)) not in self._known:
                self._explain(ask, tokens)
            self.num_explained += 1

    def _explain(self, ask: Ask, tokens: list[int]) -> None:
        gap, error, index = widest_gap(DEMO, list(ask.prompt), tokens, self._dtype)
        where = f"token {index} of {len(tokens)} after {len(ask.prompt)}"
        assert gap <= NUM_ERRORS * error, f"{where}: a gap of {gap:.5f} is more than {NUM_ERRORS} errors of {error:.5f}"
        self.widest = max(self.widest, gap / error if error else 0.0)
        self._known.add((ask, tuple(tokens)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_hurt_nodes_are_explained(dtype: str) -> None:
    """Pools of fixed size: campaigns may run beside each other on the same GPUs."""
    begin = time.monotonic()
    explained = Explained(dtype)
    arguments = ("--prefill", "1", "--decode", "2", "--rebalance-kv", "0.2", "--dtype", dtype, "--num-blocks", "300")
    with RealCluster(DEMO, *arguments, *QUICK_START, *GRAPHS[dtype], start_s=120) as cluster:
        cluster.wait_until_ready(3)
        explained.undisturbed(cluster)
        print(f"{dtype}: ready and undisturbed after {time.monotonic() - begin:.1f} s", flush=True)
        load = Load(cluster, ASKS, explained.check, SEED)
        roles = (("decode", 2), ("decode", 2), ("prefill", 1))
        campaign = Campaign(cluster, load, random.Random(SEED), roles, patience=0.0)
        campaign.moment()  # one at least, however long the start took
        while time.monotonic() - begin < SECONDS:
            campaign.moment()
        until_served(load)
        campaign.end()
    differing = f"{explained.num_explained} that leave it, by {explained.widest:.2f} errors at most"
    print(f"{dtype}: {explained.num_equal} samples equal the undisturbed run, {differing}")


@pytest.mark.alone
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_killed_node_comes_back_with_as_many_blocks() -> None:
    """Pools sized by free memory: what a dead decode node had is given back only when its peer's mapping is closed."""
    begin = time.monotonic()
    arguments = ("--prefill", "1", "--decode", "1", "--num-blocks", "0", "--gpu-memory-utilization", "0.1")
    with RealCluster(DEMO, *arguments, *QUICK_START, "--no-cuda-graphs", start_s=120) as cluster:
        cluster.wait_until_ready(2)
        load = Load(cluster, ASKS, lambda ask, tokens: None, SEED)
        until_served(load)
        blocks = [num_blocks(cluster)]
        print(f"{blocks[0]} blocks after {time.monotonic() - begin:.1f} s", flush=True)
        for role in itertools.islice(itertools.cycle(("decode", "decode", "prefill")), MOST_KILLS):
            time.sleep(0.5)
            pid = cluster.pid_of(role)
            node_id = cluster.node_of(pid)
            cluster.send(pid, signal.SIGKILL)
            wait_until_gone(pid)
            cluster.wait_until_ready(2, within_s=90, without=node_id)
            until_served(load)
            blocks.append(num_blocks(cluster))
            print(f"{role} killed: {blocks[-1]} after {time.monotonic() - begin:.1f} s, {dict(load.ends)}", flush=True)
            if len(blocks) > 2 and time.monotonic() - begin > SECONDS:
                break
        load.stop()
        assert not load.wrong, load.wrong
        cluster.wait_until_whole()
    first, then = blocks[0], blocks[1:]
    for role, count in first.items():
        assert all(count * (1 - DRIVERS_SHARE) <= after[role] <= count * (1 + DRIVERS_SHARE) for after in then), blocks
    assert then[0]["decode"] == then[1]["decode"], (
        "what the driver keeps for a peer that has come and gone must not grow"
    )


def until_served(load: Load) -> None:
    """One more request has come through: the prefill node has mapped the decode node's pool."""
    before = load.ends["result"]
    wait_until(lambda: load.ends["result"] > before, f"a result, {load.ends}")


def num_blocks(cluster: RealCluster) -> dict[str, float]:
    return {role: next(iter(cluster.by_node("num_blocks", role).values())) for role in ("decode", "prefill")}
