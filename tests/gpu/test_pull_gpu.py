"""Pulling a prefix between CUDA pools: a node goes on from pulled KV as the holder does from its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pull_nodes import PATIENT

import tandem.deploy
from in_process_cluster import BLOCK, Client, Node, node_options
from tandem.engine.sampling_params import SamplingParams
from tiny_models import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"


@pytest.mark.parametrize("way", ["local", "tcp"])
def test_pulled_kv_goes_on_as_the_holders_own(way: str) -> None:
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    nodes = []
    for index in range(2):
        device = {"device": "cuda", "device_index": index % torch.cuda.device_count()}
        nodes.append(Node(node_options("unified", DEMO, num_blocks=256, transport=way, timeouts=PATIENT, **device)))
    client = Client(*(node.info for node in nodes))
    try:
        for node in nodes:
            node.process.logic.asker.compute_seconds_per_token = lambda: 0.0  # type: ignore[attr-defined]
        for length in (5 * BLOCK + 3, 40 * BLOCK):
            prompt = random_prompt(length, seed=length, vocab_size=2048)
            outputs = []
            for name, node, holder in (("cold", 0, None), ("hit", 0, None), ("pulled", 1, nodes[0].info)):
                result = client.submit(f"{name}{length}", prompt, sampling, decode=nodes[node].info, holder=holder)
                client.wait(result)
                assert result.failed is None, result.failed
                outputs.append(result.output())
            assert outputs[2] == outputs[1]
        assert nodes[1].process.logic.handoff_counters()["pull_completed"] == 2
        for node in nodes:
            node.wait_until_whole()
    finally:
        client.close()
        for node in reversed(nodes):
            node.stop()
