"""The engine and the hand-off on CUDA: the first token that differs from fp32 on CPU must be a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tandem.deploy
from in_process_cluster import Client, Node, node_options
from tandem.engine.sampling_params import SamplingParams
from tiny_models import random_prompt, reference_greedy, reference_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
LENGTHS = (1, 17, 64, 333, 700)
NUM_TOKENS = 64


def check_against_reference(prompt: list[int], tokens: list[int], dtype: torch.dtype) -> int:
    """How many tokens agree; asserts that the first that does not was a tie within 3 × the measured logit error."""
    expected = reference_greedy(DEMO, prompt, NUM_TOKENS).token_ids
    agree = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), NUM_TOKENS)
    if agree == NUM_TOKENS:
        return agree
    sequence = torch.tensor([prompt + expected[:agree]])
    exact = reference_model(DEMO)
    with torch.inference_mode():
        logits = exact(sequence).logits[0, -1]
        rounded_model = type(exact)(exact.config).to(dtype)
        rounded_model.load_state_dict(exact.state_dict())
        rounded = rounded_model.to("cuda")(sequence.cuda()).logits[0, -1].float().cpu()
    error = float((logits - rounded).abs().max())
    gap = float(logits[expected[agree]] - logits[tokens[agree]])
    assert gap < 3 * error, f"token {agree} differs though the gap {gap:.4f} is wide (logit error {error:.4f})"
    return agree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["single", "local", "tcp"])
def test_greedy_against_fp32(way: str, dtype: str) -> None:
    from tandem.engine.config import ModelOptions

    common = {"device": "cuda", "num_blocks": 256}
    roles = ["unified"] if way == "single" else ["decode", "prefill"]
    nodes = []
    for index, role in enumerate(roles):
        options = node_options(role, DEMO, **common, device_index=index % torch.cuda.device_count())
        transport = {} if way == "single" else {"transport": way}
        fields = {**vars(options), "model": ModelOptions(str(DEMO), dtype=dtype), **transport}  # type: ignore[arg-type]
        nodes.append(Node(type(options)(**fields)))
    client = Client(*(node.info for node in nodes))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    try:
        prompts = {n: random_prompt(n, seed=n, vocab_size=2048) for n in LENGTHS}
        prefill = nodes[1].info if len(nodes) > 1 else None
        results = {
            n: client.submit(str(n), p, sampling, decode=nodes[0].info, prefill=prefill) for n, p in prompts.items()
        }
        client.wait()
        for length, prompt in prompts.items():
            assert results[length].failed is None, results[length].failed
            check_against_reference(prompt, results[length].output(), getattr(torch, dtype))
        if len(nodes) > 1:
            assert nodes[0].process.logic.sink.counters.commits == len(LENGTHS)
        for node in nodes:
            node.wait_until_whole()
    finally:
        client.close()
        for node in reversed(nodes):
            node.stop()
