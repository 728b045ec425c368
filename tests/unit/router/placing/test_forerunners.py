"""Which prompts wait for one that begins as they do: what is saved against what is waited, and nobody for good."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.engine.contracts.hashing import PromptHashes, hash_prompt
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.forerunners import HEARD_S, WORTH, Forerunners
from tandem.router.placing.outlook import Outlook

BLOCK, TOKEN_S, LONG_S = 16, 1e-3, 1e9
A, B = NodeKey("a", 1), NodeKey("b", 1)
NODE = Outlook(A, NodeReport(s_per_token=TOKEN_S, least_s_per_token=TOKEN_S))


def hashes(num_common: int, num_own: int = 0, seed: int = 0) -> PromptHashes:
    """Of a prompt whose first blocks are everybody's, and whose others are its own."""
    tokens = np.concatenate([np.arange(num_common * BLOCK), 1000 + seed + np.arange(num_own * BLOCK)]).astype(np.int32)
    return PromptHashes(tokens, BLOCK, lambda salt: b"root")


def should_wait(
    forerunners: Forerunners,
    prompt: Sequence[bytes],
    num_held: int = 0,
    waited_s: float = 0.0,
    may_wait_s: float = LONG_S,
    now: float = 0.0,
    request: str = "second",
) -> bool:
    return forerunners.should_wait(request, prompt, lambda: {A: num_held, B: 0}, waited_s, may_wait_s, now)


def placed(first_token_at: float, num_common: int = 100, num_own: int = 5) -> Forerunners:
    forerunners = Forerunners()
    forerunners.placed("first", hashes(num_common, num_own, seed=1), BLOCK, NODE, first_token_at)
    return forerunners


COMMON_S = WORTH * 100 * BLOCK * TOKEN_S  # how long what both have is worth to wait for


@pytest.mark.parametrize("num_own", [0, 1, 7, 40])
def test_it_waits_a_quarter_longer_than_computing_the_same_would_take(num_own: int) -> None:
    prompt = hashes(100, num_own, seed=5000)
    assert should_wait(placed(COMMON_S - HEARD_S - 0.001), prompt)
    assert not should_wait(placed(COMMON_S - HEARD_S + 0.001), prompt)


def test_what_a_node_holds_already_is_not_waited_for() -> None:
    prompt, forerunners = hashes(100, 9, seed=5000), placed(0.5 * COMMON_S - HEARD_S)
    assert should_wait(forerunners, prompt, num_held=49 * BLOCK)
    assert not should_wait(forerunners, prompt, num_held=51 * BLOCK)
    assert not should_wait(forerunners, prompt, num_held=100 * BLOCK)
    assert not should_wait(forerunners, prompt, num_held=109 * BLOCK)


def test_others_prompts_and_no_hashes_wait_for_nobody() -> None:
    forerunners = placed(0.0)
    assert not should_wait(forerunners, hashes(0, 100, seed=9))
    assert not should_wait(forerunners, [])
    assert not should_wait(forerunners, hashes(105), request="first"), "for itself, when it is placed again"


def test_time_that_it_has_waited_counts_so_a_prompt_that_never_comes_is_not_waited_for_for_good() -> None:
    """It was to be there at 0.2 s and is not: the second goes on when it has waited for what it is worth."""
    forerunners, prompt = placed(0.2), hashes(101)
    assert should_wait(forerunners, prompt, waited_s=COMMON_S - 0.01, now=COMMON_S - 0.01)
    assert not should_wait(forerunners, prompt, waited_s=COMMON_S + 0.01, now=COMMON_S + 0.01)
    assert not should_wait(forerunners, prompt, waited_s=0.5, may_wait_s=0.5, now=0.5)
    assert not should_wait(forerunners, prompt, may_wait_s=0.1), "it would not be there by then"
    assert not should_wait(forerunners, prompt, may_wait_s=0.0)


def test_who_waited_goes_when_the_directory_can_tell() -> None:
    forerunners, prompt = placed(1.0), hashes(100, 5)
    forerunners.settled("first", 0.4)
    assert should_wait(forerunners, prompt, waited_s=0.4, now=0.4), "not heard yet"
    assert not should_wait(forerunners, prompt, waited_s=0.4, now=0.41 + HEARD_S)
    assert len(forerunners) == 0


def test_the_next_attempt_is_waited_for_like_the_first() -> None:
    forerunners, prompt = placed(0.1), hashes(100, 5)
    forerunners.placed("first", hashes(100, 5, seed=1), BLOCK, NODE, 1.0)
    assert len(forerunners) == 1
    assert should_wait(forerunners, prompt, waited_s=COMMON_S - 1.1 - HEARD_S, now=0.0)
    assert not should_wait(forerunners, prompt, waited_s=COMMON_S - 0.9, now=0.0)


def test_of_several_the_one_is_enough_that_comes_in_time() -> None:
    forerunners = placed(10 * COMMON_S)
    assert not should_wait(forerunners, hashes(100, 5))
    forerunners.placed("other", hashes(60), BLOCK, NODE, 0.1)
    assert should_wait(forerunners, hashes(100, 5))
    assert not should_wait(forerunners, hashes(100, 5), num_held=60 * BLOCK)


def test_nothing_is_left_of_requests_that_are_over() -> None:
    rng, forerunners, under_way, now = random.Random(11), Forerunners(), set(), 0.0
    names = itertools.count()
    for _ in range(500):
        now += rng.random() * HEARD_S
        if under_way and rng.random() < 0.5:
            name = rng.choice(sorted(under_way))
            forerunners.settled(name, now)
            if rng.random() < 0.7:
                under_way.remove(name)  # the others are settled again: a first token, then the end
        else:
            name = next(names) if not under_way or rng.random() < 0.7 else rng.choice(sorted(under_way))
            under_way.add(name)
            forerunners.placed(name, hashes(name % 4, name % 3, seed=name), BLOCK, NODE, now + 1)
        should_wait(forerunners, hashes(3), now=now)
    for name in under_way:
        forerunners.settled(name, now)
    forerunners.settled("unheard of", now + 1.0)
    assert len(forerunners) == 0
    assert not forerunners._by_first


def test_as_far_as_two_prompts_are_equal_is_what_their_whole_hashes_say() -> None:
    rng = random.Random(5)
    for _ in range(200):
        num_common, begin = rng.randint(1, 40), rng.randint(0, 45)
        ours, theirs = hashes(num_common, rng.randint(0, 30), 7), hashes(num_common, rng.randint(0, 30), 9)
        pairs = zip(_whole(ours), _whole(theirs), strict=False)
        num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        forerunners = Forerunners()
        forerunners.placed("first", theirs, BLOCK, NODE, 0.0)
        worth_s = WORTH * max(0, num_equal - begin) * BLOCK * TOKEN_S
        waited_s = max(0.0, worth_s - 1e-6)
        assert should_wait(forerunners, ours, begin * BLOCK, now=1.0, waited_s=waited_s) == (worth_s > 0)
        assert not should_wait(forerunners, ours, begin * BLOCK, now=1.0, waited_s=worth_s + 1e-6)


def _whole(prompt: PromptHashes) -> list[bytes]:
    return hash_prompt(prompt._token_ids, BLOCK, lambda salt: b"root")
