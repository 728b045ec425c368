"""The reference of the HTTP API: every path of /openapi.json, and the fields of every body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tandem.deploy.site.tables import cell, table
from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.router.http.openapi import description

PAGE = "reference/http.md"
_TO_ROOT = "../"
_INTRODUCTION = """# HTTP API

Every path of the server's own `/openapi.json` and every field of its bodies, as this version has them.
What fields mean: [docs/http.md](../docs/http.md); how they compare with OpenAI's and vLLM's:
[docs/compatibility.md](../docs/compatibility.md)."""


def http_page() -> dict[str, str]:
    """Markdown by the page's path."""
    options = RouterOptions(model=ModelOptions(model="model"), enable_tokenizer_info_endpoint=True)
    api = description(options)
    schemas = api["components"]["schemas"]
    paths = table(("path", "method", "what it does", "body"), _paths(api["paths"]))
    parts = [_INTRODUCTION, "## Paths", paths]
    for name, schema in sorted(schemas.items()):
        parts += [f"## {name}", cell(schema.get("description", ""), _TO_ROOT)]
        if schema.get("properties"):
            parts.append(table(("field", "type", "default"), _fields(schema)))
    return {PAGE: "\n\n".join(part for part in parts if part)}


def _paths(paths: dict[str, Any]) -> Iterator[list[str]]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            if method == "head":
                continue
            content = operation.get("requestBody", {}).get("content", {})
            bodies = ", ".join(_type(media["schema"]) for media in content.values())
            yield [f"`{path}`", method.upper(), cell(operation["summary"], _TO_ROOT), bodies]


def _fields(schema: dict[str, Any]) -> Iterator[list[str]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
        yield [f"`{name}`", f"{_type(field)} {cell(field.get('description', ''), _TO_ROOT)}".strip(), default]


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words; names of other bodies are links to their fields."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return f"{schema.get('type', 'anything')}{_bounds(schema)}"


def _bounds(schema: dict[str, Any]) -> str:
    said = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": "&gt;", "exclusiveMaximum": "&lt;"}
    bounds = [f"{sign} {schema[name]}" for name, sign in said.items() if name in schema]
    return f" ({', '.join(bounds)})" if bounds else ""
