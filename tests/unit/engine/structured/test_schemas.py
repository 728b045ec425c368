"""Random JSON schemas: output that follows one is valid, or it is refused with a reason."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import tandem.deploy
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.step import NewSlot, SampleRow
from tandem.engine.structured.grammars import Grammars
from tandem.engine.structured.guides import Guides
from tandem.router.structured.parts import schema_part

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
VOCAB, EOS, MOST_TOKENS = 2048, 1, 80
FINITE = st.integers(-20, 20) | st.sampled_from([0.5, -2.25, 1e3])
NAMES = st.sampled_from(["a", "b", "name", "é", 'q"', "x y"])
VALUES = st.recursive(
    st.none() | st.booleans() | FINITE | st.text("ab\né😀", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
PATTERNS = st.sampled_from(["^[a-c]{1,3}$", "ab", "^x", r"\d{2}$", "^(yes|no)$", "[é-ü]+"])
FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"])


def with_some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Each keyword may be there or not; at most three are."""
    named = st.one_of([strategy.map(lambda value, name=name: (name, value)) for name, strategy in keywords.items()])
    return st.lists(named, max_size=3).map(dict)


def of_type(name: str, keywords: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return keywords.map(lambda found: {"type": name, **found})


LEAVES = st.one_of(
    st.booleans(),
    st.just({}),
    st.sampled_from(["null", "boolean", "string", "number", "integer", ["string", "null"]]).map(lambda t: {"type": t}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    of_type("string", with_some(minLength=st.integers(0, 4), maxLength=st.integers(0, 6), pattern=PATTERNS)),
    FORMATS.map(lambda name: {"type": "string", "format": name}),
    of_type("integer", with_some(minimum=FINITE, maximum=FINITE, multipleOf=st.integers(1, 5))),
    of_type("number", with_some(minimum=FINITE, exclusiveMaximum=FINITE, multipleOf=st.sampled_from([1, 0.5, 0.1]))),
    st.just({"$ref": "#/$defs/leaf"}),
    st.just({"$ref": "#/$defs/tree"}),
)


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    array = {"items": inner, "prefixItems": some, "minItems": st.integers(0, 2), "maxItems": st.integers(0, 4)}
    members = st.dictionaries(NAMES, inner, max_size=4)
    named = {"required": st.lists(NAMES, max_size=3, unique=True), "additionalProperties": inner | st.just(False)}
    rare = {"minProperties": st.integers(0, 2), "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1)}
    objects = st.tuples(members, with_some(**named, **rare)).map(lambda both: {"properties": both[0], **both[1]})
    return st.one_of(
        of_type("array", with_some(**array)),
        of_type("object", objects),
        of_type("object", objects),
        objects,
        some.map(lambda found: {"anyOf": found}),
        some.map(lambda found: {"allOf": found}),
    )


SCHEMAS = st.recursive(LEAVES, deeper, max_leaves=8)
TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "integer"}}}
DEFS = {"leaf": {"enum": ["x", 1]}, "tree": {**TREE, "required": ["value"], "additionalProperties": False}}


@cache
def grammars() -> Grammars:
    return Grammars(DEMO, VOCAB, [EOS])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@cache
def ways_out() -> list[int]:
    return [EOS, *(tokenizer().token_to_id(text) for text in ("}", "]", '"', ","))]


def written(grammar: str, rng: random.Random) -> tuple[list[int], str]:
    """Random tokens that the grammar allows; "ended", "cut", or why it failed."""
    guides = Guides(grammars())
    guides.apply([NewSlot(0, np.array([5], np.int32), 1, (), SamplingParams(grammar=grammar), 0)], ())
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS:
        guided = guides.of([SampleRow(0, 0, 0, 0, 0)])
        assert guided is not None
        masks = np.empty(guided.mask_shape, np.int32)
        guided.fill(masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "nothing is allowed, and nobody says so"
        leaving = [token for token in ways_out() if token in allowed]
        token = leaving[0] if leaving and rng.random() < 0.4 else rng.choice(allowed)
        guided.take(np.array([token]))
        if guided.failed:
            return tokens, guided.failed[0]
        tokens.append(token)
        if guided.ended:
            return tokens, "ended"
    return tokens, "cut"


def refusal_of(grammar: str) -> str:
    try:
        grammars().matcher(grammar)
    except ValueError as error:
        return str(error)
    return ""


def check(schema: Any, rng: random.Random) -> str:
    """What became of it; AssertionError for an invalid output, or a refusal without a reason."""
    if isinstance(schema, dict):
        schema = {**schema, "$defs": DEFS}
    grammar = msgspec.json.encode({"grammars": [schema_part(schema)]}).decode()
    if why := refusal_of(grammar):
        assert 5 < len(why) <= 500
        return "refused"
    tokens, end = written(grammar, rng)
    if end not in ("ended", "cut"):
        assert "grammar" in end
        return "failed"
    if end == "ended":
        text = tokenizer().decode(tokens)
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{text!r} is no {json.dumps(schema)}: {error}") from error
    return end


def run_suite(num_schemas: int) -> Counter[str]:
    found: Counter[str] = Counter()

    @seed(2026)
    @settings(max_examples=num_schemas, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(SCHEMAS, st.integers(0, 1 << 30))
    def each(schema: Any, number: int) -> None:
        found[check(schema, random.Random(number))] += 1

    each()
    return found


UNKNOWN = [
    {"not": {}}, {"if": {}, "then": {}}, {"type": "array", "uniqueItems": True}, {"type": "array", "contains": {}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"type": "string", "pattern": "(?=a)b"}, False,
    {"type": "string", "format": "nonsense"}, {"type": "integer", "minimum": 2, "maximum": 1}, {"enum": []},
    {"$ref": "#/$defs/nowhere"}, {"type": "object", "propertyNames": {"pattern": "a"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", UNKNOWN, ids=str)
def test_what_is_not_known_is_refused_wherever_it_stands(schema: Any) -> None:
    for place in (schema, {"type": "object", "properties": {"a": schema}, "required": ["a"]}, {"anyOf": [schema]}):
        assert check(place, random.Random(1)) == "refused"


def test_a_oneof_that_is_refused_says_what_to_write_instead() -> None:
    def refusal(*branches: dict[str, Any]) -> str:
        return refusal_of(msgspec.json.encode({"grammars": [schema_part({"oneOf": branches})]}).decode())

    why = refusal({"type": "integer"}, {"type": "number"})
    assert why.startswith("oneOf constraints are not supported. Take anyOf, or ")
    assert "option" not in why
    assert not refusal({"type": "integer"}, {"type": "string"}), "of other types"
    objects = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]
    assert not refusal(*objects), "with a required const each"


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"$ref": "#/$defs/round"}], ids=str)
def test_a_schema_that_is_nothing_but_itself_is_refused(schema: Any) -> None:
    whole = {**schema, "$defs": {"round": {"$ref": "#/$defs/round"}}}
    why = refusal_of(msgspec.json.encode({"grammars": [schema_part(whole)]}).decode())
    assert "refers to itself alone" in why


def test_a_hundred_schemas_are_followed_or_refused() -> None:
    found = run_suite(120)
    assert found["ended"] > 60, found
    assert found["refused"] > 10, found


@pytest.mark.slow
def test_a_thousand_schemas_are_followed_or_refused() -> None:
    found = run_suite(1_500)
    assert found["ended"] + found["refused"] > 1_000, found
