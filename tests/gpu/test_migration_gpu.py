"""Running sequences handed over between GPU nodes whose decode steps are replayed graphs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from near_ties import check_against_reference

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
NUM_TOKENS = 400


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["local", "tcp"])
def test_a_stream_goes_on_elsewhere(way: str, dtype: str) -> None:
    prompt = random_prompt(333, seed=1, vocab_size=2048)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    nodes = []
    for index, role in enumerate(("prefill", "decode", "decode")):
        options = node_options(
            role, DEMO, device="cuda", device_index=index % torch.cuda.device_count(), num_blocks=256, transport=way
        )
        nodes.append(Node(replace(options, model=ModelOptions(str(DEMO), dtype=dtype))))  # type: ignore[arg-type]
    with client_of(nodes) as client:
        prefill, here, there = (node.info for node in nodes)
        result = client.submit("r", prompt, sampling, decode=here, prefill=prefill)
        deadline = time.monotonic() + 30
        while len(result.tokens.get(0, ())) < 20:
            assert time.monotonic() < deadline, "no tokens"
            client.poll(0.002)
        moved = client.migrate(result, 0, prompt, sampling, here, there)
        client.wait(moved)
        assert moved.failed is None, moved.failed
        assert [message.reason for message in result.migrated] == [""]
        tokens = {**result.tokens[0], **moved.tokens[0]}
        assert sorted(tokens) == list(range(NUM_TOKENS))
        assert all(moved.tokens[0].get(index, token) == token for index, token in result.tokens[0].items())
        check_against_reference(DEMO, prompt, [tokens[i] for i in range(NUM_TOKENS)], getattr(torch, dtype))
        counters = nodes[1].process.logic.status({}).counters
        print(way, dtype, f"paused {counters['migrations_pause_s'] * 1e3:.1f} ms, kept {len(result.tokens[0])} tokens")
