"""`tandem explain`: asks a router what each node would cost for a prompt now, and prints it, cheapest first."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from tandem.deploy.bench.sse_client import HttpError, model_to_ask, post_json
from tandem.engine.contracts.errors import ConfigError

Columns = tuple[tuple[str, str, float], ...]
COLUMNS: Columns = (
    ("node", "node_id", 1),
    ("role", "role", 1),
    ("cost ms", "cost_s", 1e3),
    ("queue ms", "queue_s", 1e3),
    ("compute ms", "compute_s", 1e3),
    ("transfer ms", "transfer_s", 1e3),
    ("sequences ms", "sequences_s", 1e3),
    ("duplicate ms", "duplicate_s", 1e3),
    ("crowding ms", "crowding_s", 1e3),
    ("adapter ms", "adapter_s", 1e3),
    ("cached", "num_cached_tokens", 1),
    ("fetched", "num_fetched_tokens", 1),
    ("from", "fetched_from", 1),
)
PLAN_COLUMNS: Columns = (
    ("computes", "computes", 1),
    ("helped by", "helped_by", 1),
    ("decodes", "decodes", 1),
    ("pulls from", "pulls_from", 1),
    ("cost ms", "cost_s", 1e3),
    ("first token ms", "first_token_s", 1e3),
    ("due ms", "due_s", 1e3),
    ("late", "num_late", 1),
)


def run(arguments: argparse.Namespace) -> int:
    """Prints the costs. Raises ConfigError when there is no prompt, or the router doesn't answer."""
    text = _prompt(arguments)
    try:
        answer = asyncio.run(_ask(arguments, text))
    except (OSError, HttpError, ValueError, LookupError) as error:
        raise ConfigError(f"{arguments.url} does not answer as it should: {error}; check --url and --api-key") from None
    (prompt,) = answer["prompts"]
    print(f"{prompt['num_prompt_tokens']} prompt tokens, placement {answer['placement']}; costs as prefix_aware counts")
    print(table([name for name, _, _ in COLUMNS], [_row(node, COLUMNS) for node in prompt["nodes"]]))
    for node in prompt["nodes"]:
        if node["leaning_why"]:
            print(f"{node['node_id']} is for {node['leaning']} first: {node['leaning_why']}")
    if prompt["plans"]:
        print("\nby who would be late, of which the first is taken:")
        print(table([name for name, _, _ in PLAN_COLUMNS], [_row(plan, PLAN_COLUMNS) for plan in prompt["plans"]]))
    return 0


def _prompt(arguments: argparse.Namespace) -> str:
    if not arguments.prompt_file:
        if not arguments.prompt:
            raise ConfigError("give a PROMPT or --prompt-file")
        return str(arguments.prompt)
    try:
        return sys.stdin.read() if arguments.prompt_file == "-" else Path(arguments.prompt_file).read_text()
    except OSError as error:
        raise ConfigError(f"can't read {arguments.prompt_file}: {error.strerror}") from None


async def _ask(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    body = {
        "model": await model_to_ask(arguments.url, arguments.api_key, arguments.model),
        "prompt": text,
        "max_tokens": arguments.max_tokens,
    }
    answer: dict[str, Any] = await post_json(arguments.url, "/explain", body, arguments.api_key)
    return answer


def _row(node: dict[str, Any], columns: Columns) -> list[str]:
    cells = []
    for _, key, scale in columns:
        value = node[key]
        cells.append(value if isinstance(value, str) else f"{value * scale:.1f}" if scale != 1 else str(value))
    return cells


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(
            zip(row, widths, strict=True)))
        for row in [header, *rows]
    )  # fmt: skip
