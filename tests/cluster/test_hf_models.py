"""Models that run by transformers' modules: greedy tokens equal transformers', on one node and split over two."""

from __future__ import annotations

import pytest
from split_pair import GREEDY, make_pair
from tiny_hf_models import FAMILIES, tiny_hf_model

from tiny_models import check_greedy, random_prompt

LENGTHS = (1, 17, 90, 130)


RARER = ("phi", "granite", "deepseek_v2")  # like others of the list


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in RARER)) for each in FAMILIES]
)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    folder = tiny_hf_model(family)
    with make_pair("local", model=folder, decode={"num_blocks": 64}, prefill={"num_blocks": 64, "chunk": 64}) as pair:
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        split = [pair.submit(prompt, GREEDY) for prompt in prompts]
        alone = [pair.client.submit(f"alone-{len(p)}", p, GREEDY, decode=pair.decode.info) for p in prompts]
        pair.client.wait()
        for prompt, *results in zip(prompts, split, alone, strict=True):
            for result in results:
                assert result.failed is None, result.failed
                check_greedy(folder, prompt, result.output(), GREEDY.max_tokens)
        pair.check_whole()
