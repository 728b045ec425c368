"""Requests whose KV overflows fp8 fail before a token that rests on it is told; nothing saturated is found again."""

from __future__ import annotations

import random

import pytest
from engine_harness import Harness, expected

POISON = 11  # its KV saturates


def due(prompt: list[int], output: list[int]) -> list[int]:
    """The part of `output` that rests on no saturated KV: up to the first POISON, whose own KV nobody has read."""
    if POISON in prompt:
        return []
    return output[: output.index(POISON) + 1] if POISON in output else output


@pytest.mark.parametrize("seed", range(60))
def test_no_token_rests_on_saturated_kv(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=rng.choice([12, 40]), max_num_seqs=rng.choice([2, 8]), pipelined=seed % 4 > 0)
    harness.runner.saturating = {POISON}
    prompts = {}
    for index in range(8):
        prompt = [1] * rng.randrange(9) + [rng.choice([2, 3, POISON])] * rng.randrange(1, 6)
        samples = rng.choice([(0,), (0,), (0, 1, 2)])
        prompts[name := f"r{index}"] = prompt
        request = harness.add(name, prompt, samples, max_tokens=rng.randrange(1, 12), priority=rng.randrange(2))
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.15:
            harness.scheduler.state.abort(request.key)
            harness.requests.pop(name)
    harness.run()
    for name, request in harness.requests.items():
        for sample in harness.samples[name]:
            whole, _ = expected(prompts[name], sample, request.prompt.sampling)
            told, own = harness.tokens.get((name, sample), []), due(prompts[name], whole)
            if name in harness.failed:
                assert harness.failed[name] == "kv_overflow"
                assert told == own[: len(told)]
            else:
                assert told == own == whole
    found = {each[-1] for block in range(harness.pool.num_blocks) if harness.pool.block_hash(block) is not None
             for each in harness.runner.memory[block].values()}  # fmt: skip
    assert POISON not in found, "saturated KV is cached"
    harness.assert_empty()
    num_failed = sum(code == "kv_overflow" for code in harness.failed.values())
    assert harness.scheduler.state.num_overflowed >= num_failed
    spared = [n for n in prompts if POISON not in prompts[n] and n in harness.requests and n not in harness.failed]
    assert spared or num_failed, "nothing was served"
