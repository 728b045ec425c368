"""Faults of the transport: bytes that are lost, altered, late or doubled on their way."""

from __future__ import annotations

import pytest
from split_pair import GREEDY, SAMPLED, Alone, changed, make_pair

from tiny_models import random_prompt


# README says: "KV is digested end to end"
@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["corrupt:1", "drop:2", "duplicate:*", "delay:0.002", "drop:1,corrupt:4,duplicate:3"])
def test_a_fault_on_the_way_is_caught_and_mended(way: str, fault: str, alone: Alone) -> None:
    prompts = [random_prompt(length, seed=length) for length in (33, 130)]
    with make_pair(way, prefill={"fault_injection": fault, "chunk": 64}) as pair:
        results = [pair.submit(prompt, GREEDY) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, GREEDY)
        assert (pair.sink.digest_mismatches > 0) == ("corrupt" in fault or "drop" in fault)
        assert pair.sink.commits == 2, "a single fault must not cost the hand-off"
        assert pair.sink.recomputes == 0
        pair.check_whole()


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("shm", "corrupt:*"),
        ("tcp", "drop:*"),
        pytest.param("shm", "drop:*", marks=pytest.mark.slow),
        pytest.param("tcp", "corrupt:*", marks=pytest.mark.slow),
    ],
)
def test_bytes_that_never_come_right_are_computed_again(way: str, fault: str, alone: Alone) -> None:
    prompt, samples = random_prompt(90, seed=12), (0, 1)
    with make_pair(way, prefill={"fault_injection": fault}) as pair:
        for sampling in (GREEDY, changed(SAMPLED, seed=3)):
            result = pair.run(prompt, sampling, samples=samples)
            assert result.failed is None, result.failed
            assert [result.output(sample) for sample in samples] == alone.run(prompt, sampling, samples)
        assert pair.sink.recomputes >= 1
        assert pair.sink.digest_mismatches > 1
        pair.check_whole()
