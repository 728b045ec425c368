"""Running sequences handed from one decode node to another, mid-stream: no token lost, doubled or different."""

from __future__ import annotations

import random

import pytest
from decode_trio import joined, trio
from split_pair import GREEDY, SAMPLED, TWO_WAYS, Alone, changed

from tiny_models import random_prompt

LONG = 60
GUESSING = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_stream_goes_on_elsewhere_as_if_it_had_stayed(way: str, alone: Alone) -> None:
    prompts = [random_prompt(90, seed=5), random_prompt(33, seed=6)]
    guessing = {"speculative_config": GUESSING} if way in ("tcp", "local") else {}
    with trio(way, **guessing) as nodes:
        ways = {"greedy": GREEDY, "seeded": SAMPLED, "logprobs": changed(GREEDY, num_logprobs=1)}
        ways["guided"] = changed(SAMPLED, grammar="start: /([a-z]{3} ){50,}/")
        for name, sampling in ways.items():
            prompt, sampling = prompts[name == "seeded"], changed(sampling, max_tokens=LONG)
            result, moved = nodes.move_one(name, prompt, sampling)
            assert moved.failed is None, moved.failed
            assert [message.reason for message in result.migrated] == [""]
            assert not result.finished
            assert [joined(result, moved)] == alone.run(prompt, sampling)
            if sampling.num_logprobs is None:
                assert min(moved.tokens[0]) == moved.num_prior, "what the source may not have told is told again"
        assert nodes.count("migrations_finished") == 4
        assert nodes.count("migrations_pause_s") > 0
        nodes.check_whole()


def test_samples_of_one_prompt_share_its_blocks_at_the_target(alone: Alone) -> None:
    prompt, sampling, samples = random_prompt(200, seed=8), changed(SAMPLED, max_tokens=LONG), (0, 1, 2, 3)
    with trio() as nodes:
        nodes.first.hold_after(20)
        result = nodes.submit("r", prompt, sampling, samples=samples)
        nodes.until_decoding(result)
        moved, pushed = [], []
        for sample in samples:
            before = nodes.first.process.transfer.counters["kv_pushed_bytes"]
            moved.append(nodes.migrate(result, prompt, sampling, sample))
            nodes.until(lambda: len(result.migrated) == len(moved))
            pushed.append(nodes.first.process.transfer.counters["kv_pushed_bytes"] - before)
        nodes.first.go_on()
        nodes.client.wait(*moved)
        assert [joined(result, each, sample) for sample, each in enumerate(moved)] == alone.run(
            prompt, sampling, samples
        )
        assert max(pushed[1:]) < pushed[0], "the prompt's blocks were sent again"
        nodes.check_whole()


def test_there_and_back_again(alone: Alone) -> None:
    prompt, sampling = random_prompt(120, seed=9), changed(SAMPLED, max_tokens=180)
    with trio() as nodes:
        here, there = nodes.first, nodes.second
        here.hold_after(20)
        result = nodes.submit("r", prompt, sampling)
        nodes.until_decoding(result)
        output: list[int] = []
        for _ in range(3):
            there.hold_after(40)
            moved = nodes.client.migrate(result, 0, prompt, sampling, here.info, there.info, prior=output)
            nodes.until(lambda moved=moved: len(moved.tokens.get(0, ())) >= 20)  # type: ignore[misc]
            assert not result.finished
            output = [*output, *result.output()][: min(moved.tokens[0])]
            assert len(output) == min(moved.tokens[0]), "a token is missing"
            result, here, there = moved, there, here
        here.go_on()
        there.go_on()
        nodes.client.wait(result)
        assert [[*output, *result.output()]] == alone.run(prompt, sampling)
        nodes.check_whole()


@pytest.mark.parametrize("sizes", [pytest.param((16, 32), marks=pytest.mark.slow), (32, 16)])
def test_blocks_of_another_size(sizes: tuple[int, int], alone: Alone) -> None:
    prompt, sampling = random_prompt(150, seed=15), changed(SAMPLED, max_tokens=LONG)
    with trio(block_size=sizes[0], second={"block_size": sizes[1]}) as nodes:
        result, moved = nodes.move_one("r", prompt, sampling)
        assert [message.reason for message in result.migrated] == [""]
        assert [joined(result, moved)] == alone.run(prompt, sampling)
        nodes.check_whole()


@pytest.mark.parametrize(
    "fault", [pytest.param("corrupt:1", marks=pytest.mark.slow), "drop:1,duplicate:2", "corrupt:*"]
)
def test_bytes_that_arrive_wrong_are_sent_again_or_computed(fault: str, alone: Alone) -> None:
    prompt, sampling = random_prompt(90, seed=5), changed(SAMPLED, max_tokens=LONG)
    with trio(fault_injection=fault) as nodes:
        result, moved = nodes.move_one("r", prompt, sampling)
        assert [joined(result, moved)] == alone.run(prompt, sampling)
        sink = nodes.second.process.logic.handoffs.sink.counters  # type: ignore[attr-defined]
        assert sink.digest_mismatches > 0
        assert (sink.recomputes == 1) == ("*" in fault)
        nodes.check_whole()


@pytest.mark.parametrize("side", ["first", "second", "both"])
def test_a_cancel_at_any_moment_leaves_nothing(side: str) -> None:
    rng = random.Random(side)
    prompt, sampling = random_prompt(150, seed=4), changed(GREEDY, max_tokens=400)
    with trio(fault_injection="delay:0.01") as nodes:
        for turn in range(8):
            result = nodes.submit(f"r{turn}", prompt, sampling)
            nodes.until_decoding(result, 2)
            moved = nodes.migrate(result, prompt, sampling)
            nodes.client.poll(rng.random() * 0.08)
            old, new = (f"r{turn}", 0), (f"r{turn}-s0", 10)
            if side != "second":
                nodes.client.cancel(*old, nodes.first.info)
            if side != "first":
                nodes.client.cancel(*new, nodes.second.info)
            nodes.client.poll(0.02)
            nodes.until(lambda: len(result.migrated) == 1 or result.cancelled)  # noqa: B023
            nodes.client.cancel(*old, nodes.first.info)
            nodes.client.cancel(*new, nodes.second.info)
            nodes.until(lambda: moved.cancelled and result.cancelled)  # noqa: B023
        assert nodes.count("migrations_started") > 0
        nodes.check_whole()
