"""Nodes are killed, stopped and drained at random moments under load: greedy tokens equal the undisturbed run, every
request ends in a result or an honest error, and the pools come back whole.

SOAK_MOMENTS (200) says how many moments, shared out among the settings, SOAK_SEED which ones.
"""

from __future__ import annotations

import os
import random

import pytest
from soak import Ask, Campaign, Load

from real_cluster import RealCluster
from tiny_models import random_prompt, reference_greedy, tiny_model

NUM_MOMENTS = int(os.environ.get("SOAK_MOMENTS", "200"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
LENGTHS = ((5, 120), (33, 200), (70, 60), (100, 250), (180, 150), (333, 100))
ASKS = [Ask(tuple(random_prompt(length, seed=length)), num_tokens) for length, num_tokens in LENGTHS]
# Prompts that begin alike, more of them than a small pool holds: found in pools and tiers, and pulled from peers.
BEGINNINGS = [random_prompt(700, seed=seed) for seed in (1, 2, 3)]
SHARING = [Ask((*BEGINNINGS[i % 3], *random_prompt(20 + i, seed=50 + i)), 60) for i in range(6)]
SPLIT = ("--prefill", "1", "--decode", "2", "--rebalance-kv", "0.2")
WIDE = ("--prefill", "2", "--decode", "2", "--rebalance-kv", "0.2")
FAULTS = ("--fault-injection", "delay:0.001,corrupt:5,drop:9,duplicate:12")  # of each channel's writes
SMALL_POOLS = ("--num-blocks", "96", "--host-tier-bytes", "2000000", "--max-queue", "3", *FAULTS)
# Roomy pools; or such as hold few requests and have a tier below, nodes that refuse what they can't hold, bad channels.
SETTINGS = {
    "shm": (("--transport", "shm", *SPLIT), ASKS, (("decode", 2), ("decode", 2), ("prefill", 1))),
    "tcp": (("--transport", "tcp", *SPLIT), ASKS, (("decode", 2), ("decode", 2), ("prefill", 1))),
    "small pools, shm": (("--transport", "shm", *WIDE, *SMALL_POOLS), ASKS + SHARING, (("decode", 2), ("prefill", 2))),
    "small pools, tcp": (("--transport", "tcp", *WIDE, *SMALL_POOLS), ASKS + SHARING, (("decode", 2), ("prefill", 2))),
}


def is_reference(ask: Ask, tokens: list[int]) -> None:
    expected = reference_greedy(tiny_model("llama"), list(ask.prompt), ask.num_tokens).token_ids
    first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    assert first is None, f"prompt of {len(ask.prompt)}: token {first} of {len(tokens)} differs"


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_nodes_that_go_at_random_moments_change_no_token(setting: str) -> None:
    arguments, asks, roles = SETTINGS[setting]
    for ask in asks:
        reference_greedy(tiny_model("llama"), list(ask.prompt), ask.num_tokens)
    with RealCluster(tiny_model("llama"), *arguments) as cluster:
        cluster.wait_until_ready(sum(dict(roles).values()))
        load = Load(cluster, asks, is_reference, SEED)
        campaign = Campaign(cluster, load, random.Random(SEED), roles)
        for _ in range(NUM_MOMENTS // len(SETTINGS)):
            campaign.moment()
        campaign.end()
