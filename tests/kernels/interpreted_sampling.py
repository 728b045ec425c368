"""The sampling kernels under Triton's interpreter against their eager twin. Run by test_triton_interpreter.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.reference import sampling as reference
from tandem.kernels.triton_kernels.sampling import sampling, sampling_limits, token_masks

FILTERS: dict[str, tuple[int, float, float]] = {
    "none": (0, 1.0, 0.0),
    "top-k": (7, 1.0, 0.0),
    "top-k-1": (1, 1.0, 0.0),
    "top-k-all": (5000, 1.0, 0.0),
    "top-p": (0, 0.7, 0.0),
    "top-p-tiny": (0, 1e-6, 0.0),
    "top-p-most": (0, 0.999, 0.0),
    "min-p": (0, 1.0, 0.1),
    "all": (40, 0.9, 0.02),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_limits, "LIMITS_BLOCK", 128)
    monkeypatch.setattr(sampling_limits, "LISTED_AT_ONCE", 4)
    monkeypatch.setattr(sampling, "PARTS_BLOCK", 128)
    monkeypatch.setattr(token_masks, "MASK_BLOCK", 256)


def settings_of(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, ...]:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,))
    return (
        full(temperature, torch.float32), full(top_k, torch.int64), full(top_p, torch.float32),
        full(min_p, torch.float32), seeds, torch.randint(0, 9, (rows,)), torch.randint(0, 5000, (rows,)),
    )  # fmt: skip


def check(logits: torch.Tensor, settings: tuple[torch.Tensor, ...], filtered: bool = True) -> None:
    tokens = torch.full((len(logits),), -7)
    sampling.sample_triton(logits, *settings, tokens, filtered)
    assert torch.equal(tokens, reference.sample_tokens(logits, *settings))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((each, torch.float32) for each in FILTERS), ("all", torch.float16), ("none", torch.float16)]
)
def test_tokens_are_those_of_the_twin(name: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 517) * 3).to(dtype)
    check(logits, settings_of(2, 0.8, *FILTERS[name]))


LOGITS = {
    "equal ones": lambda size: (torch.randn(1, size) * 2 * 8).round() / 8,
    "flat": lambda size: torch.randn(1, size) * 0.1,
    "peaked": lambda size: torch.randn(1, size) * 0.5 + 12.0 * (torch.rand(1, size) < 0.01),
    "bans": lambda size: torch.randn(1, size).masked_fill(torch.rand(1, size) < 0.97, float("-inf")),
}


@pytest.mark.parametrize(("kind", "size"), [*((each, 300) for each in LOGITS), ("bans", 70)])
def test_limits_keep_exactly_the_tokens_of_the_definition(kind: str, size: int) -> None:
    for name, filters in FILTERS.items():
        logits = LOGITS[kind](size)
        temperature, top_k, top_p, min_p, *_ = settings_of(1, 1.3, *filters)
        cuts, last = torch.empty(1, 2), torch.empty(1, dtype=torch.int32)
        sampling_limits.find_limits(logits, temperature, top_k, top_p, min_p, cuts, last)
        scaled, ids = logits[0] / 1.3, torch.arange(size)
        kept = (logits[0] > cuts[0, 0]) | ((logits[0] == cuts[0, 0]) & (ids <= last[0]))
        kept &= scaled >= cuts[0, 1]
        finite = logits[0] > float("-inf")
        assert torch.equal(kept & finite, reference.kept_tokens(logits[0], scaled, *filters) & finite), name


def test_unfiltered_rows_need_no_limits() -> None:
    check(torch.randn(4, 700), settings_of(4, 1.0, 0, 1.0, 0.0), filtered=False)


def test_mixed_rows_with_greedy_ones_and_bans() -> None:
    logits = torch.randn(4, 640)
    logits[:, 100:600] = float("-inf")
    logits[0, [5, 9]] = 20.0
    settings = settings_of(4, 1.0, 60, 0.8, 0.0)
    settings[0][0] = 0.0
    check(logits, settings)
    assert reference.sample_tokens(logits, *settings)[0] == 5


def test_equal_logits_everywhere() -> None:
    check(torch.zeros(2, 777), settings_of(2, 1.0, 100, 1.0, 0.0))


def test_a_low_temperature_takes_the_best() -> None:
    logits = torch.randn(3, 500)
    settings: tuple[Any, ...] = settings_of(3, 1e-5, 0, 1.0, 0.0)
    check(logits, settings)
    assert torch.equal(reference.sample_tokens(logits, *settings), logits.argmax(-1))


def test_scores_too_close_for_fp32_are_compared_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "NOISE_ERROR", sampling.tl.constexpr(1e9))
    check(torch.randn(3, 400), settings_of(3, 1.0, 50, 0.9, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 700])
def test_masks_ban_what_the_twin_bans(size: int, dtype: torch.dtype) -> None:
    """The last word may reach beyond the vocabulary, and a mask beyond the last word; rows without one stay."""
    logits = torch.randn(5, size).to(dtype)
    rows = torch.tensor([4, 0, 2])
    masks = torch.randint(-(1 << 31), 1 << 31, (3, size // 32 + 2), dtype=torch.int64).to(torch.int32)
    masks[1] = -1
    expected = reference.ban_tokens(logits, rows, masks)
    token_masks.ban_tokens_triton(logits, rows, masks)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["none", "top-p-most", "all"])
def test_tokens_are_drawn_from_the_few_that_a_mask_leaves(name: str) -> None:
    logits = torch.randn(4, 1301) * 3
    masks = torch.zeros(4, 41, dtype=torch.int32)
    for row, allowed in enumerate(([7], [0, 1300], [31, 32, 33, 640], range(100, 140))):
        for token in allowed:
            masks[row, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
    token_masks.ban_tokens_triton(logits, torch.arange(4), masks)
    check(logits, settings_of(4, 0.8, *FILTERS[name]))
    tokens = torch.empty(4, dtype=torch.int64)
    sampling.sample_triton(logits, *settings_of(4, 0.8, *FILTERS[name]), tokens, True)
    assert all(masks[row, token // 32] >> (token % 32) & 1 for row, token in enumerate(tokens.tolist()))
