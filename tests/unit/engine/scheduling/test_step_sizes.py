"""Sizes of steps that are done in whole waves."""

from __future__ import annotations

import pytest

from tandem.engine.scheduling.times.step_sizes import StepSizes

# An 8B model on one H200, over 16,384 tokens of context: docs/measurements.md#sizes-of-steps.
SECONDS = {640: 0.0284, 768: 0.0324, 896: 0.0333, 1024: 0.0351, 1152: 0.0455, 1280: 0.0472, 1408: 0.0503, 1536: 0.0558,
           1792: 0.0630, 1920: 0.0690, 2048: 0.0687}  # fmt: skip


def measured() -> StepSizes:
    sizes = StepSizes()
    sizes.measured(SECONDS)
    return sizes


@pytest.mark.parametrize(
    ("num_tokens", "cut_to"),
    [(64, 64), (639, 639), (640, 640), (700, 640), (1024, 1024), (1088, 1024), (1500, 1024), (1800, 1792), (2047, 1792),
     (2048, 2048), (2053, 2048), (4095, 2048), (4096, 4096), (8192, 8192)],
)  # fmt: skip
def test_a_step_is_cut_to_the_largest_size_that_is_about_as_fast_as_the_fastest(num_tokens: int, cut_to: int) -> None:
    assert measured().at_most(num_tokens) == cut_to


def test_nothing_is_cut_where_nothing_was_measured() -> None:
    assert StepSizes().at_most(1088) == 1088


@pytest.mark.parametrize(
    ("budget", "num_beside", "left", "prompt_tokens"),
    [(1496, 4, [900, 700], 1020), (1496, 4, [900, 596], 1496), (1020, 4, [5000], 1020), (300, 4, [5000], 300)],
)
def test_prompts_are_cut_where_more_is_left_of_them_than_fits(
    budget: int, num_beside: int, left: list[int], prompt_tokens: int
) -> None:
    assert measured().cut(budget, num_beside, left) == prompt_tokens
