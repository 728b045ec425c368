"""Noise, filters, penalties and log-probabilities of the sampler against straightforward references."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tandem.engine.running import sampler
from tandem.engine.running.sampler import LogitEdits, Penalties, RandomSettings, SamplingBatch, logprobs_of, sample
from tandem.kernels.reference import sampling as reference
from tandem.kernels.sampling.gumbel import gumbel_noise, random_bits, row_keys

U64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(key: int, index: int) -> int:
    """The `index`-th output of SplitMix64 seeded with `key`, in Python's unbounded integers."""
    z = (key + (index + 1) * GAMMA) & U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
    return z ^ (z >> 31)


def unmix(z: int) -> int:
    """The word that SplitMix64's finaliser turns into `z`."""

    def unshift(value: int, shift: int) -> int:
        result = value
        for _ in range(64 // shift):
            result = value ^ (result >> shift)
        return result

    z = unshift(z, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & U64
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & U64
    return unshift(z, 30)


def as_i64(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array([v & U64 for v in values], dtype=np.uint64).view(np.int64))


def random_rows(
    n: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, output_index=None
) -> RandomSettings:
    full = lambda value, dtype=torch.float32: torch.full((n,), value, dtype=dtype)  # noqa: E731
    return RandomSettings(
        temperature_N=full(temperature),
        top_k_N=full(top_k, torch.int64),
        top_p_N=full(top_p),
        min_p_N=full(min_p),
        seed_N=torch.arange(n) if seed is None else full(seed, torch.int64),
        sample_index_N=torch.zeros(n, dtype=torch.int64),
        output_index_N=torch.zeros(n, dtype=torch.int64) if output_index is None else output_index,
        filtered=top_k > 0 or top_p < 1.0 or min_p > 0,
    )


class TestGumbel:
    def test_bits_are_splitmix64_known_answers(self):
        # Published outputs of SplitMix64 for seed 1234567.
        expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
        bits = random_bits(as_i64(1234567), 4)
        assert bits.numpy().view(np.uint64)[0].tolist() == expected

    def test_keys_match_unbounded_integers(self):
        seeds, samples, outputs = (0, 1, U64, 0x8000000000000000), (0, 3, 7, 1), (0, 9, 4095, 1 << 20)
        keys = row_keys(as_i64(*seeds), as_i64(*samples), as_i64(*outputs)).numpy().view(np.uint64)
        for key, seed, sample_index, output_index in zip(keys.tolist(), seeds, samples, outputs, strict=True):
            assert key == splitmix64(splitmix64(splitmix64(seed, 0), sample_index), output_index)

    def test_noise_known_answer(self):
        key = row_keys(as_i64(42), as_i64(1), as_i64(5))
        noise = gumbel_noise(key, 8)[0]
        chain = splitmix64(splitmix64(splitmix64(42, 0), 1), 5)
        for token in range(8):
            uniform = ((splitmix64(chain, token) >> 12) + 0.5) / 2**52
            assert noise[token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-14)

    @pytest.mark.parametrize(("bits", "expected"), [(0, -math.log(53 * math.log(2))), (U64, 53 * math.log(2))])
    def test_edges_are_finite(self, bits, expected):
        key = (unmix(bits) - GAMMA) & U64
        assert splitmix64(key, 0) == bits
        assert gumbel_noise(as_i64(key), 1).item() == pytest.approx(expected, rel=1e-9)

    def test_every_argument_counts(self):
        base = row_keys(as_i64(7), as_i64(0), as_i64(0)).item()
        others = row_keys(as_i64(8, 7, 7, 0), as_i64(0, 1, 0, 7), as_i64(0, 0, 1, 0))
        assert len({base, *others.tolist()}) == 5

    def test_moments(self):
        noise = gumbel_noise(row_keys(torch.arange(200), torch.zeros(200).long(), torch.zeros(200).long()), 1000)
        assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
        assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def exact_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Token by token in float64: temperature, then top_k, top_p (of what top_k left), min_p."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if top_k:
        order = order[:top_k]
    total, running, kept = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if top_p < 1.0 and kept and running / total >= np.float32(top_p):
            break
        kept.append(token)
        running += weights[token]
    kept = [t for t in kept if weights[t] >= min_p * weights[order[0]]]
    result = np.zeros(len(weights))
    result[kept] = weights[kept]
    return result / result.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """(statistic, its 99.9th percentile) over cells of at least 5 expected; a token of probability 0 must not occur."""
    assert counts[probabilities == 0].sum() == 0, "a filtered token was sampled"
    expected = probabilities * counts.sum()
    large = expected >= 5
    cells = [(c, e) for c, e in zip(counts[large], expected[large], strict=True)]
    if (~large).any() and expected[~large].sum() >= 5:
        cells.append((counts[~large].sum(), expected[~large].sum()))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    degrees = max(len(cells) - 1, 1)
    # Wilson-Hilferty approximation of the chi-square quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3
    return statistic, limit


class TestDistribution:
    NUM_DRAWS = 20_000
    LOGITS = torch.from_numpy(np.random.default_rng(3).normal(0, 1.5, 48).astype(np.float32))

    def draw(self, **settings) -> np.ndarray:
        rows = random_rows(self.NUM_DRAWS, **settings)
        tokens, _ = sample(self.LOGITS.repeat(self.NUM_DRAWS, 1), SamplingBatch(random=rows))
        return np.bincount(tokens.numpy(), minlength=48)

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p", "min_p"),
        [
            (1.0, 0, 1.0, 0.0),
            (0.6, 0, 1.0, 0.0),
            (1.7, 0, 1.0, 0.0),
            (1.0, 5, 1.0, 0.0),
            (1.0, 0, 0.8, 0.0),
            (1.0, 0, 1.0, 0.1),
            (0.8, 12, 0.9, 0.05),
            (1.5, 20, 0.7, 0.0),
            (1.2, 0, 0.95, 0.08),
        ],
    )
    def test_chi_square(self, temperature, top_k, top_p, min_p):
        counts = self.draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        exact = exact_distribution(self.LOGITS.numpy(), temperature, top_k, top_p, min_p)
        statistic, limit = chi_square(counts, exact)
        assert statistic < limit

    def test_chi_square_can_fail(self):
        counts = self.draw(temperature=1.0)
        wrong = exact_distribution(self.LOGITS.numpy(), 1.05, 0, 1.0, 0.0)
        statistic, limit = chi_square(counts, wrong)
        assert statistic > limit

    def test_draws_along_one_sequence(self):
        """One seed, one row, many output indices: the stream of a single request is as good as many requests."""
        rows = random_rows(self.NUM_DRAWS, seed=11, output_index=torch.arange(self.NUM_DRAWS))
        tokens, _ = sample(self.LOGITS.repeat(self.NUM_DRAWS, 1), SamplingBatch(random=rows))
        counts = np.bincount(tokens.numpy(), minlength=48)
        statistic, limit = chi_square(counts, exact_distribution(self.LOGITS.numpy(), 1.0, 0, 1.0, 0.0))
        assert statistic < limit

    def test_extreme_filters(self):
        assert self.draw(top_k=1).nonzero()[0].tolist() == [self.LOGITS.argmax().item()]
        assert self.draw(top_p=1e-6).nonzero()[0].tolist() == [self.LOGITS.argmax().item()]
        assert self.draw(min_p=1.0).nonzero()[0].tolist() == [self.LOGITS.argmax().item()]
        assert self.draw(temperature=1e-5).nonzero()[0].tolist() == [self.LOGITS.argmax().item()]

    def test_top_k_ties_go_to_the_lowest_id(self):
        rows = random_rows(500, top_k=3)
        tokens, _ = sample(torch.zeros(500, 10), SamplingBatch(random=rows))
        assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_row_by_row_definition(dtype):
    rng = np.random.default_rng(8)
    rows = 60
    logits = torch.from_numpy(rng.normal(0, 3, (rows, 400)).astype(np.float32)).to(dtype)
    pick = lambda *values: torch.from_numpy(rng.choice(values, rows))  # noqa: E731
    settings = RandomSettings(
        temperature_N=pick(0.0, 0.3, 1.0, 1.7).float(),
        top_k_N=pick(0, 1, 40, 1000),
        top_p_N=pick(1.0, 0.9, 0.3, 1e-7).float(),
        min_p_N=pick(0.0, 0.01, 0.3).float(),
        seed_N=torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, rows)),
        sample_index_N=torch.from_numpy(rng.integers(0, 9, rows)),
        output_index_N=torch.from_numpy(rng.integers(0, 1 << 20, rows)),
        filtered=True,
    )
    tokens, _ = sample(logits, SamplingBatch(random=settings))
    expected = reference.sample_tokens(logits, *(getattr(settings, field.name) for field in fields(settings)[:-1]))
    assert torch.equal(tokens, expected)
    assert len(tokens.unique()) > 20


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, 100)
    logits[1, [17, 60, 99]] = 2.0
    assert sample(logits, SamplingBatch())[0].tolist() == [0, 17]


def test_mixed_rows_do_not_disturb_each_other():
    torch.manual_seed(0)
    logits = torch.randn(6, 64)
    full = random_rows(6, temperature=0.9, top_k=10, min_p=0.01)
    together, _ = sample(logits.clone(), SamplingBatch(random=full))
    temperature = torch.where(torch.isin(torch.arange(6), torch.tensor([4, 1])), full.temperature_N, 0.0)
    mixed, _ = sample(logits.clone(), SamplingBatch(random=replace(full, temperature_N=temperature)))
    greedy = logits.argmax(-1)
    expected = [together[row].item() if row in (4, 1) else greedy[row].item() for row in range(6)]
    assert mixed.tolist() == expected
    assert together.tolist() != greedy.tolist()


def test_penalties_against_a_loop():
    torch.manual_seed(1)
    vocab, outputs, prompts = 20, [[3, 3, 5], [0], []], [[5, 7], [1, 1], [2]]
    settings = [(1.3, 0.5, 0.25), (0.8, -0.4, 0.0), (2.0, 0.0, 1.0)]
    logits = torch.randn(4, vocab)
    counts = torch.tensor([np.bincount(o, minlength=vocab).tolist() for o in outputs], dtype=torch.int32)
    in_prompt = torch.tensor([[t in p for t in range(vocab)] for p in prompts])
    columns = torch.tensor(settings)
    penalties = Penalties(torch.tensor([0, 2, 3]), columns[:, 0], columns[:, 1], columns[:, 2], counts, in_prompt)
    expected = logits.double().numpy().copy()
    for place, row in enumerate((0, 2, 3)):
        repetition, presence, frequency = settings[place]
        for token in range(vocab):
            count = outputs[place].count(token)
            if count or token in prompts[place]:
                expected[row, token] = (
                    expected[row, token] / repetition if expected[row, token] > 0 else expected[row, token] * repetition
                )
            expected[row, token] -= frequency * count + presence * (count > 0)
    actual = logits.clone()
    sampler._apply_penalties(actual, penalties)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(actual[0], logits[0])


def test_edits_bias_and_ban():
    logits = torch.zeros(2, 8)
    logits[:, 2] = 5.0
    edits = LogitEdits(torch.tensor([0, 0, 1]), torch.tensor([2, 6, 2]), torch.tensor([-math.inf, 1.0, 2.0]))
    assert sample(logits, SamplingBatch(edits=edits))[0].tolist() == [6, 2]


class TestLogprobs:
    def test_against_log_softmax(self):
        torch.manual_seed(2)
        logits = torch.randn(3, 50) * 3
        result = logprobs_of(logits, torch.tensor([4, 7, 9]), 5)
        exact = torch.log_softmax(logits.double(), -1)
        for row, token in enumerate((4, 7, 9)):
            order = exact[row].argsort(descending=True)
            assert result.token_LK1[row].tolist() == [token, *order[:5].tolist()]
            np.testing.assert_allclose(result.logprob_LK1[row], exact[row][result.token_LK1[row]], atol=1e-5)
            assert result.rank_L[row].item() == order.tolist().index(token) + 1

    def test_they_are_of_the_raw_distribution(self):
        torch.manual_seed(3)
        logits = torch.randn(2, 30)
        edits = LogitEdits(torch.tensor([1]), torch.tensor([12]), torch.tensor([50.0]))
        batch = SamplingBatch(
            edits=edits,
            random=random_rows(2, temperature=2.0, top_k=3),
            logprob_row_L=torch.tensor([1]),
            max_num_logprobs=2,
        )
        tokens, logprobs = sample(logits.clone(), batch)
        assert tokens[1] == 12
        raw = logits[1].log_softmax(-1)
        assert logprobs.token_LK1.tolist() == [[12, *raw.topk(2).indices.tolist()]]
        assert logprobs.logprob_LK1[0, 0].item() == pytest.approx(raw[12].item(), abs=1e-6)

    def test_more_than_the_vocabulary_is_the_vocabulary(self):
        assert logprobs_of(torch.randn(1, 4), torch.tensor([0]), 9).token_LK1.shape == (1, 5)
