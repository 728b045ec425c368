"""What the router makes of a tenant and the operator's public prefixes: who may find a prompt's blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from router_in_thread import make_tokenizer_folder

from tandem.engine.contracts.hashing import EVERYBODYS, Secrecy
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.router.access.api_keys import EVERYBODY, Tenant
from tandem.router.text.completion import PromptPlan
from tandem.router.text.privacy import Privacy
from tandem.router.text.tokenizer import Tokenizer

ACME = Tenant("acme", b"a" * 16, 0.5)
SYSTEM = "def function(argument): return argument + 1"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tokenizer_folder(tmp_path_factory.mktemp("t") / "model", with_bos=True))


def plan(token_ids: list[int]) -> PromptPlan:
    return PromptPlan(np.array(token_ids, np.int32), None, SamplingParams(max_tokens=1))


def test_the_longest_way_along_any_prefix_counts(tokenizer: Tokenizer) -> None:
    privacy = Privacy(tokenizer, [[1, 2, 3], [1, 2, 3, 4, 5], [7, 8]])
    cases = {(1, 2, 3, 9): 3, (1, 2, 9): 2, (1, 2, 3, 4, 5, 6): 5, (1,): 1, (7, 8, 1): 2, (8,): 0}
    for prompt, num_public in cases.items():
        assert privacy.num_public_tokens(np.array(prompt, np.int32)) == num_public, prompt


def test_texts_are_tokenized_as_prompts_are(tokenizer: Tokenizer) -> None:
    privacy = Privacy(tokenizer, [SYSTEM])
    alone, prompt = tokenizer.encode(SYSTEM), tokenizer.encode(SYSTEM + "; the quick brown fox")
    num_public = privacy.num_public_tokens(np.array(prompt, np.int32))
    assert len(alone) - 2 <= num_public <= len(alone), "where they meet, a token or two may come out differently"


def test_only_salted_plans_say_what_is_public(tokenizer: Tokenizer) -> None:
    privacy = Privacy(tokenizer, [[1, 2, 3]])
    own = privacy.apply(plan([1, 2, 9]), ACME, "")
    assert (own.secrecy, own.cache_share) == (Secrecy(ACME.salt, 2), 0.5)
    narrowed = privacy.apply(plan([1, 2, 9]), ACME, "alice")
    assert narrowed.secrecy == Secrecy(ACME.salt_for("alice"), 2) != own.secrecy
    assert privacy.apply(plan([1, 2, 9]), EVERYBODY, "").secrecy == EVERYBODYS
    adapted = replace(plan([1, 2, 9]), secrecy=Secrecy(context=b"adapter"))
    assert privacy.apply(adapted, ACME, "").secrecy == Secrecy(ACME.salt, 2, b"adapter")


def test_a_prompt_is_compared_with_many_prefixes_that_begin_alike(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 1_000, 4_096).tolist()
    privacy = Privacy(tokenizer, [[*shared, number] for number in range(20)])
    prompt = np.array([*shared, *shared], np.int32)
    assert privacy.num_public_tokens(prompt) == 4_096 + (shared[0] < 20)
