"""Models with an encoder: greedy tokens equal transformers', on one node and split; what of the encoder is kept, shared
and handed over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from router_in_thread import RouterInThread
from split_pair import GREEDY, Pair, changed, make_pair
from tiny_encoder_models import FAMILIES, LENGTH, audio_input, check_greedy, sequence, text_input, tiny_encoder_model

from in_process_cluster import BLOCK, Result
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tiny_models import random_prompt

LENGTHS = (1, 17, 64, 130)
RARER = ("mbart", "pegasus", "marian")  # like others of the list


def inputs_of(family: str) -> list[MediaItem]:
    if family == "whisper":
        return [audio_input(seed) for seed in range(3)]
    return [text_input(random_prompt(length, seed=length)) for length in LENGTHS]


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in RARER)) for each in FAMILIES]
)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    folder = tiny_encoder_model(family)
    with make_pair("local", model=folder, decode={"num_blocks": 64}, prefill={"num_blocks": 64, "chunk": 48}) as pair:
        facts = pair.decode.info.encoder
        assert facts is not None
        cases = [(item, sequence(item, facts), []) for item in inputs_of(family)]
        for item, prompt, results in cases:
            results.append(pair.submit(prompt, GREEDY, media=(item,)))
            alone = pair.client.submit(f"alone-{id(item)}", prompt, GREEDY, decode=pair.decode.info, media=(item,))
            results.append(alone)
        pair.client.wait()
        outputs = []
        for item, _, results in cases:
            for result in results:
                assert result.failed is None, result.failed
                check_greedy(folder, item, facts.prompt, result.output())
            outputs.append(tuple(results[0].output()))
        assert len(set(outputs)) == len(cases), "the encoder's input makes no difference"
        assert len(set().union(*outputs)) > 8, "too few distinct tokens for a test"
        pair.check_whole()


@pytest.fixture(scope="module")
def bart() -> Iterator[Pair]:
    with make_pair("local", model=tiny_encoder_model("bart")) as pair:
        yield pair


def asked(pair: Pair, item: MediaItem, sampling: SamplingParams = GREEDY, **options: object) -> Result:
    assert pair.decode.info.encoder is not None
    return pair.submit(sequence(item, pair.decode.info.encoder), sampling, media=(item,), **options)


def spans(pair: Pair) -> tuple[int, int]:
    """(inputs encoded, positions of them stored), of both nodes together."""
    counters = [node.process.runner.counters for node in (pair.decode, pair.prefill)]
    return tuple(sum(each[name] for each in counters) for name in ("encoder_runs", "encoder_positions_stored"))


def test_an_input_is_encoded_once_handed_over_once_and_found_again(bart: Pair) -> None:
    """The encoder's KV is cached by all of the input: an input that only begins like another one is encoded anew."""
    item, layout = text_input(random_prompt(100, seed=5)), bart.decode.info.layout
    runs, stored = spans(bart)
    pushed = bart.pushed_bytes
    first = asked(bart, item)
    bart.client.wait(first)
    assert spans(bart) == (runs + 1, stored + 100)
    blocks = 128 // BLOCK + 1  # the span's, and one of the decoder's, of which one slot is used
    block_bytes = layout.payload_bytes
    assert (blocks - 1) * block_bytes < bart.pushed_bytes - pushed <= blocks * block_bytes
    again = asked(bart, item)
    bart.client.wait(again)
    assert (again.num_reused_tokens, again.output()) == (128, first.output())
    assert spans(bart) == (runs + 1, stored + 100), "a cached input is encoded again"
    like = asked(bart, text_input([*random_prompt(100, seed=5)[:-1], 7]))
    bart.client.wait(like)
    assert like.num_reused_tokens == 0
    assert like.output() != first.output()
    assert spans(bart) == (runs + 2, stored + 200)
    bart.check_whole()


def test_samples_share_the_blocks_of_their_input(bart: Pair) -> None:
    item, num_samples = text_input(random_prompt(90, seed=6)), 4
    pool = bart.decode.process.pool
    bart.decode.hold_after(6)
    result = asked(bart, item, changed(GREEDY, temperature=0.9, max_tokens=20), samples=tuple(range(num_samples)))
    bart.until(lambda: len(result.tokens) == num_samples and all(len(each) > 3 for each in result.tokens.values()))
    assert pool.num_blocks - pool.num_free == 128 // BLOCK + num_samples
    bart.decode.go_on()
    bart.client.wait(result)
    assert len({tuple(result.output(sample)) for sample in range(num_samples)}) > 1
    bart.check_whole()


def test_pools_too_small_for_all_compute_inputs_again() -> None:
    """Sequences lose their blocks, and both parts of them come back."""
    folder = tiny_encoder_model("bart")
    small = {"num_blocks": 21, "host_tier_bytes": 0}
    with make_pair("local", model=folder, decode=small, prefill={"num_blocks": 12, "host_tier_bytes": 0}) as pair:
        facts = pair.decode.info.encoder
        assert facts is not None
        items = [text_input(random_prompt(40 + seed, seed=seed)) for seed in range(5)]
        sampling = changed(GREEDY, max_tokens=60)
        pair.decode.hold_after(0)
        results = [asked(pair, item, sampling) for item in items]
        pair.until(lambda: pair.sink.commits >= 3)  # which are more than it has room for in the end
        pair.decode.go_on()
        pair.client.wait()
        for item, result in zip(items, results, strict=True):
            assert result.failed is None, result.failed
            check_greedy(folder, item, facts.prompt, result.output())
        assert pair.decode.process.logic.scheduler.state.num_preemptions
        pair.check_whole()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"media": ()}, "outside of"),
        ({"prompt": [5, 6]}, "must be all"),
        ({"length": LENGTH + 1}, "1 to 160 tokens"),
        ({"max_tokens": LENGTH}, "the decoder takes 160 tokens"),
        ({"prompt_logprobs": 1}, "no log-probabilities of its prompt"),
    ],
)
def test_what_the_model_cannot_take_is_refused(change: dict, why: str, bart: Pair) -> None:
    facts = bart.decode.info.encoder
    assert facts is not None
    item = text_input(random_prompt(change.get("length", 9), seed=1))
    media = change.get("media", (item,)) if "prompt" not in change else ()
    prompt = change.get("prompt") or sequence(item, facts)
    logprobs = change.get("prompt_logprobs")
    sampling = changed(GREEDY, max_tokens=change.get("max_tokens", 4), num_prompt_logprobs=logprobs)
    result = bart.client.submit(f"bad-{why}", prompt, sampling, decode=bart.decode.info, media=media)
    bart.client.wait(result)
    assert result.failed is not None
    assert why in result.failed.message
    bart.check_whole()


@pytest.fixture(scope="module")
def router(bart: Pair) -> Iterator[RouterInThread]:
    nodes = (bart.decode.info.control_address, bart.prefill.info.control_address)
    with RouterInThread(tiny_encoder_model("bart"), nodes, local_tail_tokens=0) as router:
        yield router.wait_ready()


def post(router: RouterInThread, **body: object) -> tuple[int, dict]:
    answer = router.client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    return answer.status_code, answer.json()


def test_a_completions_prompt_is_what_the_encoder_hears(bart: Pair, router: RouterInThread) -> None:
    ids = random_prompt(70, seed=9)
    facts = bart.decode.info.encoder
    assert facts is not None
    pushed = bart.source.handoffs_completed
    status, answer = post(router, prompt=[ids, ids[:30]], max_tokens=12, return_token_ids=True, n=2)
    assert status == 200, answer
    for index, choice in enumerate(answer["choices"]):
        given = (ids, ids[:30])[index // 2]
        assert choice["prompt_token_ids"] == given
        check_greedy(tiny_encoder_model("bart"), text_input(given), facts.prompt, choice["token_ids"])
    assert answer["usage"]["prompt_tokens"] == 100 + 2 * len(facts.prompt)
    bart.until(lambda: bart.source.handoffs_completed == pushed + 2)  # or it was not split
    status, answer = post(router, prompt="def tokens(", max_tokens=4)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": [5] * (LENGTH + 1)}, "encoder takes 1 to 160"),
        ({"prompt": [5], "max_tokens": LENGTH}, "the decoder begins with 1 tokens and max_tokens is 160"),
        ({"prompt": [5], "echo": True}, "echo"),
        ({"prompt": [5], "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_body_that_the_model_cannot_answer_is_refused(body: dict, why: str, router: RouterInThread) -> None:
    status, answer = post(router, **body)
    assert status == 400
    assert why in answer["error"]["message"]
