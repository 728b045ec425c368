"""Where samples stand in their grammars: a function of grammar and output, whatever way the sample came."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from waiting import wait_until

import tandem.deploy
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.process.workshop import Workshop
from tandem.engine.scheduling.step import ForkSlot, NewSlot, SampleRow
from tandem.engine.structured.grammars import MAX_GRAMMAR_BYTES, Grammars
from tandem.engine.structured.guides import GuidedSamples, Guides

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
VOCAB, EOS = 2048 + 40, 1  # logits are wider than the tokenizer
POINT = 'start: "(" /[0-9]{1,3}/ ", " /[0-9]{1,3}/ ")"'
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO, VOCAB, [EOS])


def new_slot(slot: int, grammar: str, output: list[int] = [], sample: int = 0, **limits: Any) -> NewSlot:  # noqa: B006
    tokens = np.array([*PROMPT, *output], np.int32)
    return NewSlot(slot, tokens, len(PROMPT), (), SamplingParams(grammar=grammar, **limits), sample)


def rows(*slots_and_samples: tuple[int, int]) -> list[SampleRow]:
    return [SampleRow(i, slot, 0, sample, 0) for i, (slot, sample) in enumerate(slots_and_samples)]


def allowed(guided: GuidedSamples | None) -> list[set[int]]:
    """Tokens that each guided sample may take next."""
    assert guided is not None
    masks = np.full(guided.mask_shape, 77, np.int32)
    guided.fill(masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert bits[:, VOCAB:].sum() == 0 or bits[:, VOCAB:].all(axis=1).any()
    return [set(np.flatnonzero(row[:VOCAB]).tolist()) for row in bits]


def walk(guides: Guides, slot: int, tokens: list[int], sample: int = 0) -> GuidedSamples:
    """Takes the tokens one step after the other; the last step."""
    for token in tokens:
        guided = guides.of(rows((slot, sample)))
        assert guided is not None
        assert token in allowed(guided)[0]
        guided.take(np.array([token]))
    return guided


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_a_grammar_is_followed_to_its_end(grammars: Grammars) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(3, POINT)], ())
    *tokens, last = ids_of("(12, 3)")
    guided = walk(guides, 3, tokens)
    assert (guided.ended, guided.failed) == (set(), {})
    assert walk(guides, 3, [last]).ended == {0}
    overshoot = guides.of(rows((3, 0)))
    assert overshoot is not None
    assert len(allowed(overshoot)[0]) == VOCAB, "what is drawn after the end is dropped: anything will do"
    overshoot.take(np.array([9]))
    assert (overshoot.ended, overshoot.failed) == ({0}, {})


def test_the_end_token_is_allowed_where_the_grammar_may_end(grammars: Grammars) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, "start: /[a-z]+/")], ())
    [first] = allowed(guides.of(rows((0, 0))))
    assert EOS not in first
    walk(guides, 0, ids_of("abc"))
    [further] = allowed(guides.of(rows((0, 0))))
    assert EOS in further
    assert walk(guides, 0, [EOS]).ended == {0}


def test_a_guide_that_is_made_anew_allows_what_the_old_one_did(grammars: Grammars) -> None:
    """As after a hand-off, a move, a preemption, a failed attempt."""
    tokens = ids_of("(12, 345)")
    guides = Guides(grammars)
    guides.apply([new_slot(0, POINT)], ())
    for count in range(1, len(tokens)):
        walk(guides, 0, tokens[count - 1 : count])
        guides.apply([new_slot(1, POINT, tokens[:count])], ())
        old, new = allowed(guides.of(rows((0, 0), (1, 0))))
        assert old == new != set()


def test_forks_and_samples_of_one_slot_go_their_own_ways(grammars: Grammars) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, POINT, sample=4)], [ForkSlot(2, 0, 3, (), 5)])
    guided = guides.of(rows((0, 4), (2, 5), (0, 6)))
    assert guided is not None
    allowed(guided)
    [bracket] = ids_of("(")
    guided.take(np.array([bracket] * 3))
    walk(guides, 0, ids_of("1"), sample=4)
    comma = ids_of(",")[0]
    by_sample = allowed(guides.of(rows((0, 4), (2, 5), (0, 6))))
    assert [comma in each for each in by_sample] == [True, False, False]


def test_a_slot_forgets_who_had_it_before(grammars: Grammars) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, POINT), new_slot(1, POINT)], ())
    in_flight = guides.of(rows((0, 0), (1, 0)))
    guides.apply([new_slot(0, ""), new_slot(1, 'start: "x"')], ())
    assert in_flight is not None
    allowed(in_flight)
    in_flight.take(np.array([ids_of("(")[0]] * 2))
    after = guides.of(rows((0, 0), (1, 0)))
    assert after is not None
    assert after.indices == [1]
    assert allowed(after)[0] == set(ids_of("x"))
    assert guides.of(rows((0, 0))) is None


@pytest.mark.parametrize(
    ("grammar", "output", "why"),
    [
        ("start: nothing", [], "can't be followed"),
        ("start: a\na: a", [], "refers to itself alone"),
        ('start: "(" a\na: a', ids_of("("), "can't be followed further"),
        (POINT, ids_of("no"), "doesn't follow"),
        (POINT, ids_of("(1, 2)"), "ended its grammar"),
        ("x" * (MAX_GRAMMAR_BYTES + 1), [], "bytes at most"),
    ],
)
def test_what_cannot_be_followed_fails_alone(grammars: Grammars, grammar: str, output: list[int], why: str) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, grammar, output), new_slot(1, POINT)], ())
    guided = guides.of(rows((0, 0), (1, 0)))
    _, others = allowed(guided)
    assert others == {token for token in others if TOKENIZER.decode([token]).startswith("(")} != set()
    assert guided is not None
    guided.take(np.array([3, ids_of("(")[0]]))
    assert list(guided.failed) == [0]
    assert why in guided.failed[0]
    assert guided.ended == set()


def test_a_token_that_the_grammar_has_no_place_for_fails_its_sample(grammars: Grammars) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, POINT)], ())
    guided = guides.of(rows((0, 0)))
    assert guided is not None
    guided.take(np.array([ids_of("x")[0]]))
    assert "was left" in guided.failed[0]


def test_a_model_whose_tokenizer_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="knows no grammars"):
        Grammars(tmp_path, VOCAB).matcher(POINT)


def test_a_workshop_keeps_the_order_and_whoever_needs_none_waits_for_nobody(grammars: Grammars) -> None:
    workshop = Workshop("grammars")
    said: list[tuple[str, str]] = []

    def say(what: str) -> None:
        said.append((what, threading.current_thread().name))

    fresh = json.dumps({"grammars": [{"json_schema": {"const": "fresh"}}]})
    workshop.prepare(None, lambda: say("nothing"))
    assert said == [("nothing", "MainThread")]
    workshop.prepare(partial(grammars.prepare, fresh), lambda: say("fresh"))
    workshop.prepare(partial(grammars.prepare, "start: nowhere"), lambda: say("broken"))
    workshop.prepare(None, lambda: say("behind"))
    wait_until(lambda: len(said) == 4, "the workshop")
    assert [what for what, _ in said[1:]] == ["fresh", "broken", "behind"]
    assert fresh in grammars
    workshop.stop()


def test_tokens_are_held_to_lists_of_ids(grammars: Grammars) -> None:
    guides = Guides(grammars)
    allowed_ids = (31, 63, VOCAB - 1)
    guides.apply([new_slot(0, "", allowed_token_ids=allowed_ids), new_slot(1, "", bad_words=((31,), (8, 31, 64)))], ())
    by_slot = allowed(guides.of(rows((0, 0), (1, 0))))
    assert by_slot[0] == set(allowed_ids)
    assert by_slot[1] == set(range(VOCAB)) - {31}
    walk(guides, 1, [8])
    assert walk(guides, 0, [63, 31]).ended == set()


def test_a_sequence_is_banned_where_it_would_end(grammars: Grammars) -> None:
    """Whatever way the sample came, and for each sample by itself."""
    guides, banned = Guides(grammars), ((8, 9, 64), (9, 65))
    guides.apply([new_slot(0, "", bad_words=banned), new_slot(1, "", [5, 8, 9], bad_words=banned)], [])
    walk(guides, 0, [8])
    assert allowed(guides.of(rows((0, 0), (0, 1)))) == [set(range(VOCAB))] * 2
    walk(guides, 0, [9])
    assert allowed(guides.of(rows((0, 0), (0, 1), (1, 0)))) == [
        set(range(VOCAB)) - {64, 65}, set(range(VOCAB)), set(range(VOCAB)) - {64, 65}
    ]  # fmt: skip
    walk(guides, 0, [9])
    assert allowed(guides.of(rows((0, 0)))) == [set(range(VOCAB)) - {65}]


def test_limits_hold_within_a_grammar(grammars: Grammars) -> None:
    guides = Guides(grammars)
    [no] = ids_of("7")
    guides.apply([new_slot(0, "start: /[0-9]/", bad_words=((no,),))], ())
    [digits] = allowed(guides.of(rows((0, 0))))
    assert digits == {ids_of(digit)[0] for digit in "012345689"}


@pytest.mark.parametrize(
    ("grammar", "limits"),
    [
        ("", {"allowed_token_ids": (5,), "bad_words": ((5,),)}),
        ("", {"allowed_token_ids": (EOS, 6), "min_tokens": 1, "stop_token_ids": (6,)}),
        ('start: "(" /.*/', {"allowed_token_ids": (4,)}),
    ],
)
def test_limits_that_leave_nothing_fail_alone(grammars: Grammars, grammar: str, limits: dict[str, Any]) -> None:
    guides = Guides(grammars)
    guides.apply([new_slot(0, grammar, **limits), new_slot(1, POINT)], ())
    guided = guides.of(rows((0, 0), (1, 0)))
    allowed(guided)
    assert guided is not None
    guided.take(np.array([0, ids_of("(")[0]]))
    assert list(guided.failed) == [0]
    assert "leave no token" in guided.failed[0]
