"""Models that run by transformers' modules: greedy tokens equal transformers', on one node and split over two."""

from __future__ import annotations

import pytest
from split_pair import GREEDY, run_both_ways
from tiny_hf_models import FAMILIES, tiny_hf_model

from tiny_models import check_greedy

LENGTHS = (1, 17, 90, 130)


RARER = ("phi", "granite", "deepseek_v2")  # like others of the list


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in RARER)) for each in FAMILIES]
)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    folder = tiny_hf_model(family)
    for prompt, output in run_both_ways(folder, LENGTHS):
        check_greedy(folder, prompt, output, GREEDY.max_tokens)
