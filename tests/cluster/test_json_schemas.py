"""Schemas as people write them, over HTTP: each gives output that is valid, or a refusal that says why; nothing else.

The shapes are those of JSONSchemaBench's collections (calls of functions, settings of tools, resources of clusters,
records of catalogues), made anew at random. Which random schemas a grammar follows: tests/unit/engine/structured.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from router_in_thread import RouterInThread

import tandem.deploy
from in_process_cluster import Node, node_options

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
NUM_STREAMS = 8
WORDS = (
    "name",
    "id",
    "kind",
    "spec",
    "items",
    "labels",
    "created_at",
    "é-mail",
    "x y",
    "count",
    "$schema",
    "url",
    "ref",
)
PATTERNS = (
    "^[a-z][a-z0-9-]{0,8}$",
    r"^\d{3}-\d{4}$",
    "^(GET|POST)$",
    "[A-F0-9]{4}",
    r"^v\d+(\.\d+)?$",
    "^[^/]+$",
    r"^\S+@\S+$",
)
FORMATS = (
    "date",
    "date-time",
    "time",
    "uuid",
    "ipv4",
    "ipv6",
    "email",
    "hostname",
    "uri",
    "duration",
    "regex",
    "uri-reference",
)
NOTES = ("title", "description", "$comment", "default", "examples", "deprecated", "readOnly")
RARE: tuple[dict[str, Any], ...] = (
    {"not": {"const": 1}}, {"if": {"const": 1}, "then": {"const": 1}}, {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}}, {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "maxProperties": 1}, {"type": "object", "minProperties": 1},
    {"type": "object", "unevaluatedProperties": False}, {"type": "string", "pattern": "(?=a)a"},
    {"type": "string", "contentEncoding": "base64"}, {"$ref": "https://example.com/other"}, {"$ref": "#/$defs/gone"},
    {"type": "integer", "minimum": 3, "maximum": 2}, {"enum": []}, {"type": "nothing"}, {"type": []},
    {"type": "string", "maxLength": -1}, {"type": "object", "required": "name"}, {"properties": []}, {"anyOf": []},
    {"type": "string", "pattern": "("}, {"x-kubernetes-int-or-string": True}, {"nullable": True, "type": "string"},
)  # fmt: skip


class Schemas:
    """Random schemas: most of them of everyday keywords, one in eight with a rare one somewhere."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self) -> Any:
        schema = self._object(3) if self._rng.random() < 0.8 else self._any(3)
        if self._rng.random() < 0.5:
            schema["$schema"] = self._rng.choice(["http://json-schema.org/draft-07/schema#", JSON_2020])
        schema["$defs"] = {"leaf": self._leaf(), "tree": TREE}
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.02:
            return dict(rng.choice(RARE))
        if depth == 0 or rng.random() < 0.5:
            return self._leaf()
        kinds = (self._object, self._object, self._array, self._choice)
        return rng.choice(kinds)(depth - 1)

    def _leaf(self) -> dict[str, Any]:
        rng = self._rng
        leaf: dict[str, Any] = rng.choice((
            {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"},
            {"type": ["string", "null"]}, {"enum": rng.sample(["a", "b c", 1, 2.5, None, True], 3)}, {"const": "fixed"},
            {"type": "string", "format": rng.choice(FORMATS)}, {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)},
            {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(9, 300)},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, {"type": "integer", "multipleOf": 5}, {},
            {"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"},
        ))  # fmt: skip
        leaf = dict(leaf)
        if rng.random() < 0.3:
            leaf[rng.choice(NOTES)] = rng.choice(["of no effect", None, 1])
        return leaf

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(WORDS, rng.randint(0, 5))
        members = {name: self._any(depth) for name in names}
        schema: dict[str, Any] = {"type": "object", "properties": members}
        if rng.random() < 0.7:
            schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.6:
            schema["additionalProperties"] = rng.choice([False, False, True, {"type": "integer"}])
        if rng.random() < 0.08:
            schema["patternProperties"] = {"^x-": self._leaf()}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array", "items": self._any(depth)}
        if rng.random() < 0.7:
            least = rng.randint(0, 2)
            schema |= {"minItems": least, "maxItems": least + rng.randint(0, 2)}
        if rng.random() < 0.1:
            schema["prefixItems"] = [self._leaf()]
        return schema

    def _choice(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        branches = [self._any(depth) for _ in range(rng.randint(1, 3))]
        return {rng.choice(["anyOf", "anyOf", "oneOf", "allOf"]): branches}


JSON_2020 = "https://json-schema.org/draft/2020-12/schema"
TREE = {"type": "object", "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}}}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterInThread]:
    nodes = [Node(node_options(role, DEMO, num_blocks=1024)) for role in ("prefill", "decode")]
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(DEMO, addresses, local_tail_tokens=0) as router:
        yield router.wait_ready()
    for node in nodes:
        node.stop()


def asked(router: RouterInThread, schema: Any, number: int) -> str:
    """What became of it; "wrong …" for an answer that isn't valid by the draft that the schema names, a refusal without
    a reason, and anything else."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": f"{number}:"}], "response_format": form, "seed": number}
    answer = router.client.post("/v1/chat/completions", json={**body, "max_tokens": 100, "temperature": 0.7})
    said = answer.json()
    if answer.status_code == 400:
        why, param = said["error"]["message"], said["error"]["param"]
        if "followed further" in why:  # a part that nothing fits, found when the output came to it
            return "failed"
        is_clear = param == "response_format" and len(why) > 40
        return f"refused: {reason_of(why)}" if is_clear else f"wrong: {why} for {json.dumps(schema)}"
    if answer.status_code != 200:
        return f"wrong: {answer.status_code} {said} for {json.dumps(schema)}"
    [choice] = said["choices"]
    if choice["finish_reason"] == "length":
        return "cut"
    try:
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        validator(schema).validate(json.loads(choice["message"]["content"]))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"wrong: {choice['message']['content']!r} is no {json.dumps(schema)}: {error}"
    return "valid"


def reason_of(why: str) -> str:
    """A refusal without what is the schema's own, so that alike ones count as one."""
    why = why.removeprefix("response_format can't be followed: ").removeprefix("JSON schema compilation failed: ")
    return re.sub(r"[\"'`].*[\"'`]|\d+|#\S*|\[.*\]", "…", why)[:70]


def run_suite(router: RouterInThread, num_schemas: int) -> Counter[str]:
    made = Schemas(random.Random(2026))
    schemas = [made() for _ in range(num_schemas)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        found = Counter(pool.map(lambda number: asked(router, schemas[number], number), range(num_schemas)))
    router.wait_idle()
    print(json.dumps(found, indent=1, ensure_ascii=False))
    wrong = [kind for kind in found if kind.startswith("wrong")]
    assert not wrong, "\n".join(wrong)
    return found


def test_schemas_over_http_are_followed_or_refused(router: RouterInThread) -> None:
    found = run_suite(router, 20)
    assert found["valid"] >= 5, found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_schemas_over_http(router: RouterInThread) -> None:
    found = run_suite(router, 1_000)
    assert found["valid"] > 200, found
    assert sum(found.values()) == 1_000
