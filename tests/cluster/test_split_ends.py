"""Cancels, duplicates, a lost router, deadlines: each request ends once and leaves nothing behind."""

from __future__ import annotations

import random

import pytest
from split_pair import GREEDY, SAMPLED, TWO_WAYS, Alone, Pair, changed, make_pair
from waiting import PATIENCE_S

from in_process_cluster import Client, Result
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.requests import Cancel
from tiny_models import random_prompt

# --- cancels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", TWO_WAYS)
def test_cancel_at_any_moment(way: str, alone: Alone) -> None:
    """Writes are slow and the decode node's pool small, so that cancels meet queued claims, pushes and decoding."""
    rng = random.Random(way)
    long = changed(GREEDY, max_tokens=200)
    options = {"decode": {"num_blocks": 60}, "prefill": {"fault_injection": "delay:0.003", "chunk": 64}}
    with make_pair(way, **options) as pair:
        results = []
        for turn in range(24):
            results.append(pair.submit(random_prompt(rng.choice((5, 90, 250)), seed=turn), long))
            pair.client.poll(rng.random() * 0.05)
            if rng.random() < 0.8:
                victim = rng.choice(results)
                for _ in range(rng.choice((1, 1, 3))):
                    pair.cancel(victim)
        for result in results:
            pair.cancel(result)
        pair.client.wait()
        failures = [result.failed for result in results if result.failed is not None]
        # The decode node may close the grant before the prefill node hears of the cancel: its write is refused then.
        causes = ("cancelled", "is not open here")
        assert all(any(cause in failure.message for cause in causes) for failure in failures), failures
        pair.check_whole()
        prompt = random_prompt(90, seed=1)
        assert [pair.run(prompt, GREEDY).output()] == alone.run(prompt, GREEDY), "the nodes do not work any more"


def test_duplicates_of_submit_and_cancel(shm: Pair, alone: Alone) -> None:
    prompt, commits = random_prompt(60, seed=21), shm.sink.commits
    result = shm.submit(prompt, GREEDY, name="twice")
    first = result
    for _ in range(3):
        shm.client.results["twice", 0] = first
        resend(shm, "twice", prompt, GREEDY)
    shm.client.wait(result)
    assert result.failed is None, result.failed
    assert [result.output()] == alone.run(prompt, GREEDY)
    resend(shm, "twice", prompt, GREEDY)  # after its end: answered, not run again
    accepted = result.accepted
    shm.until(lambda: result.accepted >= accepted + 2)
    assert shm.sink.commits == commits + 1
    for _ in range(2):
        shm.cancel(result)
    shm.until(lambda: result.cancelled)
    assert result.finished == {0: "length"}


def resend(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    """The same Submit again, to both nodes, into the same Result."""
    known = pair.client.results[name, 0]
    pair.submit(prompt, sampling, name=name)
    pair.client.results[name, 0] = known


def test_cancel_before_submit_leaves_nothing(shm: Pair) -> None:
    result = shm.client.results["early", 0] = Result()
    shm.cancel(result)
    shm.until(lambda: result.cancelled)
    again = shm.submit(random_prompt(40, seed=3), GREEDY, name="early")
    shm.until(lambda: again.accepted >= 2)
    shm.client.poll(0.2)
    assert not again.tokens


def test_cancel_of_one_sample(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(60, seed=22), (0, 1, 2)
    sampling = changed(SAMPLED, max_tokens=60)
    pair.decode.hold_after(20)
    result = pair.submit(prompt, sampling, samples=samples)
    pair.until(lambda: len(result.tokens.get(1, ())) >= 3)
    request_id, attempt = pair.client.key_of(result)
    for node in (pair.decode, pair.prefill):
        pair.client.send(node.info, Cancel(request_id=request_id, attempt=attempt, sample_indices=(1,)))
    pair.until(lambda: result.cancelled)
    pair.decode.go_on()
    pair.until(lambda: {0, 2} <= result.finished.keys())
    assert 1 not in result.finished
    expected = alone.run(prompt, sampling, samples)
    assert [result.output(0), result.output(2)] == [expected[0], expected[2]]
    assert expected[1][: len(result.output(1))] == result.output(1)


# --- other ends ---------------------------------------------------------------------------------------------


def test_a_lost_router_takes_its_requests_along(alone: Alone) -> None:
    quick = Timeouts(heartbeat_s=0.1, peer_lost_s=3.0, resend_s=0.1, drain_s=PATIENCE_S)
    slow = {"fault_injection": "delay:0.01", "chunk": 64, "timeouts": quick}
    with make_pair("tcp", decode={"timeouts": quick, "num_blocks": 60}, prefill=slow) as pair:
        other = Client(pair.decode.info, pair.prefill.info)
        results = [
            other.submit(
                f"lost{i}",
                random_prompt(200, seed=i),
                changed(GREEDY, max_tokens=1000),
                decode=pair.decode.info,
                prefill=pair.prefill.info,
            )
            for i in range(6)
        ]
        while not any(result.tokens for result in results):
            other.poll(0.01)
            pair.client.poll(0.0)
        other.close()
        pair.check_whole()
        for node in (pair.decode, pair.prefill):
            assert not node.process.logic.book.entries
        prompt = random_prompt(90, seed=1)
        assert [pair.run(prompt, GREEDY).output()] == alone.run(prompt, GREEDY)


def test_a_small_decode_pool_grants_in_order(alone: Alone) -> None:
    lengths = (300, 20, 250, 100, 333, 15, 320)
    prompts = [random_prompt(length, seed=1000 + length) for length in lengths]
    with make_pair("shm", decode={"num_blocks": 30}) as pair:
        results = [pair.submit(prompt, changed(GREEDY, max_tokens=12)) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, changed(GREEDY, max_tokens=12))
        pair.check_whole()


def test_the_deadline_ends_a_request_wherever_it_is(pair: Pair) -> None:
    long = changed(GREEDY, max_tokens=1500)
    results = [pair.submit(random_prompt(400, seed=i), long, deadline_s=0.02 + 0.15 * i) for i in range(3)]
    pair.client.wait()
    for result in results:
        assert result.failed is not None
        if result.failed.code == "handoff_failed":  # the other node's deadline came first, and this one was told
            assert result.failed.retryable
        else:
            assert (result.failed.code, result.failed.retryable) == ("deadline_exceeded", False)


@pytest.mark.parametrize(
    ("prompt", "words"), [([5, 512], "outside"), ([-1], "outside"), ([], "at least one"), ([5] * 2049, "2048")]
)
def test_what_can_never_be_served_is_refused_for_good(shm: Pair, prompt: list[int], words: str) -> None:
    for mode_result in (
        shm.run(prompt, GREEDY),
        run_full(shm, prompt),
    ):
        assert mode_result.failed is not None
        assert not mode_result.failed.retryable
        assert words in mode_result.failed.message


def run_full(pair: Pair, prompt: list[int]) -> Result:
    result = pair.client.submit(f"full-{len(pair.client.results)}", prompt, GREEDY, decode=pair.decode.info)
    pair.client.wait(result)
    return result
