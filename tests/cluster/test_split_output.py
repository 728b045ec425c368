"""Split serving gives what one node gives: seeds, samples, cached prefixes, next attempts, log-probabilities."""

from __future__ import annotations

import math

import pytest
from split_pair import GREEDY, SAMPLED, Alone, Pair, changed, make_pair

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kv_connector.transports.links.ucx import ucx_problem
from tiny_models import random_prompt

# --- sampling -----------------------------------------------------------------------------------------------


# README says: "A seeded request draws the same random numbers wherever it runs"
def test_a_seed_gives_the_same_tokens_alone_and_split(pair: Pair, alone: Alone) -> None:
    prompts = [random_prompt(length, seed=100 + length) for length in (1, 16, 77)]
    results = [pair.submit(prompt, SAMPLED) for prompt in prompts]
    pair.client.wait()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.failed is None, result.failed
        assert [result.output()] == alone.run(prompt, SAMPLED)
    assert results[0].output() != alone.run(prompts[0], changed(SAMPLED, seed=1))[0], "the seed does not matter"


def test_four_samples_are_one_prefill_and_one_handoff(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(77, seed=4), (0, 1, 2, 3)
    commits, handoffs = pair.sink.commits, pair.source.handoffs_completed
    result = pair.run(prompt, SAMPLED, samples=samples)
    assert result.failed is None, result.failed
    pair.until(lambda: pair.source.handoffs_completed > handoffs)
    assert (pair.sink.commits, pair.source.handoffs_completed) == (commits + 1, handoffs + 1)
    outputs = [result.output(sample) for sample in samples]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == alone.run(prompt, SAMPLED, samples)
    assert outputs == [alone.run(prompt, SAMPLED, (sample,))[0] for sample in samples]
    assert [pair.run(prompt, SAMPLED, samples=(sample,)).output(sample) for sample in (1, 3)] == [
        outputs[1],
        outputs[3],
    ]


@pytest.mark.skipif(bool(ucx_problem()), reason=ucx_problem())
def test_ucx_hands_prompts_over(alone: Alone) -> None:
    """Of one chunk and of several. No other transport is at hand."""
    with make_pair("ucx", prefill={"chunk": 64}) as pair:
        prompts = [random_prompt(length, seed=length) for length in (17, 200)]
        results = [pair.submit(prompt, GREEDY) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, GREEDY)
        assert pair.sink.commits == len(prompts)
        pair.check_whole()


# --- ends at the first token --------------------------------------------------------------------------------


def test_one_token_ends_on_the_prefill_node(pair: Pair, alone: Alone) -> None:
    prompt, commits = random_prompt(40, seed=7), pair.sink.commits
    result = pair.run(prompt, changed(GREEDY, max_tokens=1), samples=(0, 1))
    assert result.failed is None, result.failed
    assert result.finished == {0: "length", 1: "length"}
    assert result.output() == alone.run(prompt, GREEDY)[0][:1]
    pair.check_whole()
    assert pair.sink.commits == commits, "a hand-off without anything to go on with was committed"


def test_eos_at_the_first_token(shm: Pair, alone: Alone) -> None:
    prompt = random_prompt(40, seed=8)
    ((first, *_),) = alone.run(prompt, GREEDY)
    result = shm.run(prompt, changed(GREEDY, stop_token_ids=(first,)))
    assert result.failed is None, result.failed
    assert (result.output(), result.finished) == ([first], {0: "stop"})


def test_some_samples_end_at_the_first_token(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(50, seed=9), (0, 1, 2, 3)
    hot = changed(SAMPLED, temperature=8.0, top_p=1.0, min_p=0.0)
    firsts = [output[0] for output in alone.run(prompt, hot, samples)]
    assert len(set(firsts)) > 1, "choose another seed"
    stopping = changed(hot, stop_token_ids=(firsts[0],))
    expected = alone.run(prompt, stopping, samples)
    result = pair.run(prompt, stopping, samples=samples)
    assert result.failed is None, result.failed
    assert [result.output(sample) for sample in samples] == expected
    assert result.finished[0] == "stop"
    assert len(result.output(0)) == 1


# --- prefix cache -------------------------------------------------------------------------------------------


def test_what_the_decode_node_has_is_not_pushed_again(pair: Pair) -> None:
    prompt = random_prompt(200, seed=11)
    start = pair.pushed_bytes
    first = pair.run(prompt, GREEDY)
    pair.check_whole()
    middle = pair.pushed_bytes
    second = pair.run(prompt, GREEDY)
    assert first.failed is None
    assert second.failed is None
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
    assert first.output() == second.output()
    assert 0 < pair.pushed_bytes - middle < (middle - start) / 4


# --- attempts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("split", [True, False])
def test_the_next_attempt_goes_on_where_the_client_is(
    shm: Pair, alone: Alone, sampling: SamplingParams, split: bool
) -> None:
    sampling = changed(sampling, max_tokens=60)
    prompt = random_prompt(70, seed=31)
    expected = alone.run(prompt, sampling)[0]
    name = f"attempts-{split}-{sampling.seed}"
    shm.decode.hold_after(20)
    first = shm.submit(prompt, sampling, name=name)
    shm.until(lambda: len(first.tokens.get(0, ())) >= 5)
    seen = first.output()
    num_seen = len(seen)
    peers = {"prefill": shm.prefill.info} if split else {}
    second = shm.client.submit(
        name, [*prompt, *seen], sampling, decode=shm.decode.info, attempt=1, num_prior=num_seen, **peers
    )
    shm.until(lambda: second.accepted > 0)
    shm.decode.go_on()
    shm.client.wait(second)
    assert second.failed is None, second.failed
    assert min(second.tokens[0]) == num_seen
    assert seen + second.output() == expected
    assert not first.finished, "the old attempt went on"
    shm.cancel(first)


# --- what comes beside the tokens ---------------------------------------------------------------------------


def test_logprobs_and_prompt_logprobs(shm: Pair) -> None:
    prompt = random_prompt(40, seed=41)
    sampling = changed(GREEDY, num_logprobs=4, num_prompt_logprobs=2)
    full = shm.client.submit("full", prompt, sampling, decode=shm.decode.info)
    split = shm.submit(prompt, changed(GREEDY, num_logprobs=4))
    shm.client.wait(full, split)
    assert full.failed is None
    assert split.failed is None
    assert full.output() == split.output()
    for result in (full, split):
        assert len(result.logprobs[0]) == 24
        for token, entry in zip(result.output(), result.logprobs[0], strict=True):
            check_entry(entry, 4)
            assert entry.token_ids[0] == entry.token_ids[1] == token, "greedy takes the best"
            assert entry.rank == 1
    for alone_entry, split_entry in zip(full.logprobs[0], split.logprobs[0], strict=True):
        assert split_entry.logprobs == pytest.approx(alone_entry.logprobs, abs=1e-3)
    assert [entry.token_ids[0] for entry in full.prompt_logprobs] == prompt[1:]
    for entry in full.prompt_logprobs:
        check_entry(entry, 2)


def check_entry(entry, num_top: int) -> None:  # type: ignore[no-untyped-def]
    assert len(entry.token_ids) == len(entry.logprobs) == num_top + 1
    top = entry.logprobs[1:]
    assert list(top) == sorted(top, reverse=True)
    assert sum(math.exp(value) for value in top) <= 1 + 1e-5
    assert all(value <= 0 for value in entry.logprobs)
    assert (entry.rank <= num_top) == (entry.token_ids[0] in entry.token_ids[1:])
