"""Split serving between nodes that keep KV differently gives the tokens of one node."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from split_pair import GREEDY, SAMPLED, WAYS, Alone, Pair, changed, make_pair

from in_process_cluster import Node, node_options
from tiny_models import random_prompt, tiny_model

SIZES = [(16, 32), (32, 16), (32, 48)]  # of the prefill and the decode node; hashes are of 16 tokens
QUICK_SIZES = [pytest.param(SIZES[0], marks=pytest.mark.slow), *SIZES[1:]]
LENGTHS = (1, 16, 17, 31, 33, 64, 211)
CHUNK = 48  # of the prefill node: no multiple of 32
PairOf = Callable[[str, tuple[int, int]], Pair]


@pytest.fixture(scope="module")
def sized() -> Iterator[PairOf]:
    with ExitStack() as stack:
        started: dict[tuple, Pair] = {}

        def get(way: str, sizes: tuple[int, int]) -> Pair:
            if (way, sizes) not in started:
                options = {"prefill": {"block_size": sizes[0], "chunk": CHUNK}, "decode": {"block_size": sizes[1]}}
                started[way, sizes] = stack.enter_context(make_pair(way, **options))
            pair = started[way, sizes]
            pair.renew_client()
            return pair

        yield get


# README says: "KV is converted on the way"
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_of_one_node(sized: PairOf, alone: Alone, way: str) -> None:
    pair = sized(way, SIZES[way in ("shm", "local")])
    prompts = [random_prompt(length, seed=1000 + length) for length in LENGTHS]
    commits = pair.sink.commits
    results = [pair.submit(prompt, GREEDY) for prompt in prompts]
    pair.client.wait()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.failed is None, result.failed
        assert [result.output()] == alone.run(prompt, GREEDY), f"a prompt of {len(prompt)} tokens"
    assert pair.sink.commits == commits + len(LENGTHS)
    pair.check_whole()


@pytest.mark.parametrize("sizes", QUICK_SIZES, ids=str)
def test_cached_prefixes_count_in_each_nodes_own_blocks(sized: PairOf, alone: Alone, sizes: tuple[int, int]) -> None:
    pair = sized("shm", sizes)
    prefix = random_prompt(112, seed=5)  # 7 blocks of 16, 3 of 32, 2 of 48
    prompts = [prefix + random_prompt(tail, seed=tail) for tail in (7, 40, 41)]
    pair.run(prompts[0], GREEDY)
    for prompt in prompts[1:]:
        pushed = pair.pushed_bytes
        result = pair.run(prompt, GREEDY)
        assert result.failed is None, result.failed
        assert [result.output()] == alone.run(prompt, GREEDY)
        hits = 112 // sizes[1] * sizes[1]
        assert result.num_cached_tokens == hits
        layout = pair.prefill.info.layout
        assert layout is not None
        assert pair.pushed_bytes - pushed == (len(prompt) - hits) * layout.payload_bytes / layout.block_size
    pair.check_whole()


@pytest.mark.parametrize("sizes", QUICK_SIZES, ids=str)
def test_four_samples_fork_in_the_decode_nodes_blocks(sized: PairOf, alone: Alone, sizes: tuple[int, int]) -> None:
    pair, samples = sized("shm", sizes), (0, 1, 2, 3)
    prompt = random_prompt(77, seed=4)
    result = pair.run(prompt, SAMPLED, samples=samples)
    assert result.failed is None, result.failed
    assert [result.output(sample) for sample in samples] == alone.run(prompt, SAMPLED, samples)
    pair.check_whole()


def test_corrupt_blocks_are_sent_again(alone: Alone) -> None:
    faulty = {"block_size": 32, "chunk": CHUNK, "fault_injection": "corrupt:1"}
    with make_pair("tcp", prefill=faulty, decode={"block_size": 16}) as pair:
        prompt = random_prompt(100, seed=6)
        result = pair.run(prompt, changed(GREEDY, max_tokens=8))
        assert result.failed is None, result.failed
        assert [result.output()] == alone.run(prompt, changed(GREEDY, max_tokens=8))
        assert pair.sink.digest_mismatches == 1
        pair.check_whole()


# --- numbers --------------------------------------------------------------------------------------------------

SHORT = changed(GREEDY, max_tokens=12)
SCALES = {"k": [0.05, 0.02, 0.1], "v": [0.02, 0.05, 0.04]}  # of the model's three layers


@pytest.fixture(scope="module")
def scales_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    path.write_text(json.dumps(SCALES))
    return path


@pytest.mark.parametrize(
    ("way", "dtype", "block_size", "is_scaled"),
    [
        ("local", "bfloat16", 16, False),
        ("shm", "fp8_e4m3", 32, True),
        pytest.param("tcp", "fp8_e4m3", 16, False, marks=pytest.mark.slow),
    ],
)
def test_a_converted_prompt_goes_on_as_on_a_node_of_that_dtype(
    alone: Alone, scales_file: Path, way: str, dtype: str, block_size: int, is_scaled: bool
) -> None:
    """A chunk attends to its own keys before they are rounded. So a node that keeps KV in that dtype all the time has
    the same KV if it computes the prompt in one chunk, without a cached prefix: the same tokens, and not fp32's.
    """
    kept = {"kv_cache_dtype": dtype, "kv_scales": scales_file if is_scaled else ""}
    prefix = random_prompt(70, seed=9)
    prompts = [random_prompt(length, seed=2000 + length) for length in (17, 100, 211)]
    prompts += [prefix + random_prompt(length, seed=length) for length in (5, 40)]
    whole = Alone(Node(node_options("unified", tiny_model("llama"), caching=False, **kept)))
    expected = [whole.run(prompt, SHORT)[0] for prompt in prompts]
    samples = whole.run(prompts[0], SAMPLED, (0, 1))
    whole.node.stop()
    exact = (alone.run(prompt, SHORT)[0] for prompt in prompts)
    assert any(one != other for one, other in zip(expected, exact, strict=True)), "the dtype does not matter"
    with make_pair(way, decode={"block_size": block_size, **kept}, prefill={"chunk": CHUNK}) as pair:
        for prompt, tokens in zip(prompts, expected, strict=True):
            result = pair.run(prompt, SHORT)
            assert result.failed is None, result.failed
            assert result.output() == tokens, f"a prompt of {len(prompt)} tokens"
        assert result.num_cached_tokens == 70 // block_size * block_size
        forked = pair.run(prompts[0], SAMPLED, samples=(0, 1))
        assert [forked.output(0), forked.output(1)] == samples
        assert pair.sink.commits == len(prompts) + 1
        pair.check_whole()
