"""Sampling on a GPU gives the tokens of the definition: every filter, odd vocabularies, NaN around, graphs, no late
compilation."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tandem.engine.running.sampler import LogitEdits, Penalties, RandomSettings, SamplingBatch, sample
from tandem.kernels.check.compilations import CompilationCounter
from tandem.kernels.reference import sampling as reference
from tandem.kernels.sampling.sampling import _sample_eagerly, sample_tokens
from tandem.kernels.sampling.token_masks import ban_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCABULARY = 128_256
FILTERS: dict[str, tuple[int, float, float]] = {
    "none": (0, 1.0, 0.0),
    "top-k": (50, 1.0, 0.0),
    "top-k-1": (1, 1.0, 0.0),
    "top-k-all": (1 << 40, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "top-p-tiny": (0, 1e-6, 0.0),
    "top-p-most": (0, 0.9999, 0.0),
    "min-p": (0, 1.0, 0.05),
    "all": (40, 0.9, 0.02),
}


def random_logits(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider matrix that holds NaN beside them."""
    wide = torch.full((rows, size + 24), float("nan"), dtype=dtype, device="cuda")
    logits = wide[:, 8 : 8 + size]
    return logits.copy_(torch.randn(rows, size, device="cuda") * 3)


def settings_of(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> list[torch.Tensor]:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    def indices(limit: int) -> torch.Tensor:
        return torch.randint(0, limit, (rows,), device="cuda")

    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), device="cuda")
    top_ks = torch.full((rows,), top_k, dtype=torch.int64, device="cuda")
    return [full(temperature), top_ks, full(top_p), full(min_p), seeds, indices(9), indices(1 << 20)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    logits = random_logits(200, VOCABULARY, dtype)
    settings = settings_of(200, 0.8, *FILTERS[name])
    settings[0][::7] = 0.0
    tokens = sample_tokens(logits, *settings)
    assert torch.equal(tokens, _sample_eagerly(logits.float(), *settings, True))
    few = [setting[:3].cpu() for setting in settings]
    assert torch.equal(tokens[:3].cpu(), reference.sample_tokens(logits[:3].cpu(), *few))


@pytest.mark.parametrize("size", [1, 2, 31, 1023, 1025, 4097, 50_257, 151_936, 262_145])
def test_vocabularies_of_any_size(size: int) -> None:
    for filters in (FILTERS["none"], FILTERS["all"], FILTERS["top-p-most"]):
        for rows in (1, 5):
            logits, settings = random_logits(rows, size, torch.bfloat16), settings_of(rows, 1.1, *filters)
            assert torch.equal(sample_tokens(logits, *settings), _sample_eagerly(logits.float(), *settings, True))


def test_unfiltered_rows_need_no_limits() -> None:
    logits, settings = random_logits(300, VOCABULARY, torch.bfloat16), settings_of(300, 1.0, *FILTERS["none"])
    tokens = sample_tokens(logits, *settings, filtered=False)
    assert torch.equal(tokens, sample_tokens(logits, *settings))
    assert len(tokens.unique()) > 100


def test_equal_logits_go_to_the_lowest_ids() -> None:
    logits, settings = torch.zeros(256, 30_000, device="cuda"), settings_of(256, 1.0, 5, 1.0, 0.0)
    assert set(sample_tokens(logits, *settings).tolist()) == set(range(5))
    settings[0].zero_()
    assert set(sample_tokens(logits, *settings).tolist()) == {0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e-45])
def test_broken_logits_end_with_a_token_in_range(bad: float) -> None:
    logits, settings = torch.randn(6, 5000, device="cuda"), settings_of(6, 0.7, *FILTERS["all"])
    logits[0, 17], logits[1], logits[2, 100:], logits[3, ::2], logits[4, 1:3] = bad, bad, bad, bad, 2 * bad
    tokens = sample_tokens(logits, *settings)
    assert ((tokens >= 0) & (tokens < 5000)).all()
    assert tokens[5] == _sample_eagerly(logits, *settings, True)[5]


def test_a_graph_serves_other_settings() -> None:
    logits, settings = random_logits(9, VOCABULARY, torch.bfloat16), settings_of(9, 0.8, *FILTERS["all"])
    out = torch.empty(9, dtype=torch.int64, device="cuda")
    sample_tokens(logits, *settings, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, *settings, out)
    logits.copy_(torch.randn(9, VOCABULARY))
    for old, new in zip(settings, settings_of(9, 1.5, *FILTERS["top-p"]), strict=True):
        old.copy_(new)
    settings[0][4] = 0.0
    graph.replay()
    assert torch.equal(out, _sample_eagerly(logits.float(), *settings, True))
    assert out[4] == logits[4].argmax()


def test_nothing_is_compiled_for_other_batches() -> None:
    logits = random_logits(64, VOCABULARY, torch.bfloat16).contiguous()
    for filtered in (False, True):
        sample_tokens(logits, *settings_of(64, 0.8, *FILTERS["all"]), filtered=filtered)
    compiled = CompilationCounter()
    for rows in (1, 2, 3, 16, 17, 63):
        settings = [setting[1 : rows + 1] for setting in settings_of(rows + 1, 0.8, *FILTERS["all"])]
        for filtered in (False, True):
            sample_tokens(logits[:rows], *settings, filtered=filtered)
    assert compiled.num_total == 0


def test_the_engines_sampler_agrees_with_the_cpu() -> None:
    """Bans, penalties, log-probabilities, greedy and drawn rows in one batch."""
    rows, size = 12, 9000
    random = RandomSettings(*(s.cpu() for s in settings_of(rows, 0.9, *FILTERS["all"])), filtered=True)
    random.temperature_N[::3] = 0.0
    logits = torch.randn(rows, size) * 2
    edits = LogitEdits(torch.arange(rows), logits.argmax(1), torch.full((rows,), float("-inf")))
    penalised = torch.tensor([0, 1, 7])
    counts = torch.from_numpy(np.random.default_rng(1).integers(0, 2, (3, size)).astype(np.int32))
    penalties = Penalties(
        penalised, torch.full((3,), 1.5), torch.full((3,), 0.5), torch.full((3,), 0.25), counts, counts > 1
    )
    batch = SamplingBatch(edits, penalties, random, torch.tensor([1, 3]), 4)
    expected, expected_logprobs = sample(logits, batch)
    tokens, logprobs = sample(logits.cuda(), to_gpu(batch))
    assert torch.equal(tokens.cpu(), expected)
    assert logprobs is not None
    assert expected_logprobs is not None
    assert torch.equal(logprobs.token_LK1.cpu(), expected_logprobs.token_LK1)
    torch.testing.assert_close(logprobs.logprob_LK1.cpu(), expected_logprobs.logprob_LK1)


def to_gpu(part: object) -> object:
    """A dataclass with all its tensors, deep inside too, on the GPU."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    moved = {
        name: value.cuda() if isinstance(value, torch.Tensor) else to_gpu(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) or hasattr(value, "__dataclass_fields__")
    }
    return replace(part, **moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2048, 128_256, 151_937])
def test_masks_ban_what_the_definition_bans(size: int, dtype: torch.dtype) -> None:
    logits = random_logits(64, size, dtype)
    rows = torch.randperm(64, device="cuda")[:9]
    words = torch.randint(-(1 << 31), 1 << 31, (9, -(-size // 32)), device="cuda").to(torch.int32)
    words[0] = -1
    expected = logits.cpu().clone()
    ban_tokens(expected, rows.cpu(), words.cpu())  # the eager path, whose own twin is in tests/kernels
    ban_tokens(logits, rows, words)
    assert torch.equal(logits.cpu(), expected)


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_drawn_from_the_few_that_masks_leave(name: str) -> None:
    """As grammars do: of 128 thousand tokens a handful is left."""
    logits = random_logits(64, VOCABULARY, torch.bfloat16)
    settings = settings_of(64, 0.8, *FILTERS[name])
    settings[0][::7] = 0.0
    words = torch.zeros(64, VOCABULARY // 32, dtype=torch.int32, device="cuda")
    words[torch.arange(64), torch.randint(0, VOCABULARY // 32, (64,))] = 5
    ban_tokens(logits, torch.arange(64, device="cuda"), words)
    tokens = sample_tokens(logits, *settings)
    assert torch.equal(tokens.cpu(), reference.sample_tokens(logits.cpu(), *(each.cpu() for each in settings)))
    assert bool(((words[torch.arange(64), tokens // 32] >> (tokens % 32)) & 1).all())
