"""`tandem status`: what a cluster's nodes have to do now, as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from tandem.deploy.bench.sse_client import HttpError, get_json
from tandem.deploy.explain import table
from tandem.engine.contracts.errors import ConfigError

CLEAR = "\x1b[H\x1b[2J"  # of a terminal: to the top left, everything erased
HEADER = [
    "node",
    "role",
    "state",
    "running",
    "waiting",
    "tokens due",
    "KV used",
    "cache hits",
    "host",
    "disk",
    "prefill",
]


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when the cluster serves, else 1. Raises ConfigError when the router doesn't answer."""
    is_ready = _show_once(arguments)
    while arguments.watch:
        time.sleep(arguments.watch)
        is_ready = _show_once(arguments)
    return 0 if is_ready else 1


def _show_once(arguments: argparse.Namespace) -> bool:
    """Prints the state, on a terminal that is watched in place of the one before, as JSON in a line each."""
    try:
        said = asyncio.run(get_json(arguments.url, "/status", arguments.api_key))
        indent = None if arguments.watch else 2
        shown = json.dumps(said, indent=indent) if arguments.json else as_text(arguments.url, said)
    except (OSError, HttpError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{arguments.url} does not answer as it should: {error}; check the URL, and --api-key, which needs the "
            "scope admin"
        ) from None
    is_redrawn = bool(arguments.watch) and not arguments.json and sys.stdout.isatty()
    print(f"{CLEAR}{shown}" if is_redrawn else shown, flush=True)
    return bool(said["ready"])


def as_text(url: str, said: dict[str, Any]) -> str:
    """What `GET /status` answers, for people."""
    state = "ready" if said["ready"] else f"not ready: {said['missing']}"
    lines = [f"Tandem {said['version']} at {url}: {state}"]
    if said["model"] is not None:
        lines.append(f"model {said['model']}, {said['max_model_len']:,} tokens at most")
    requests = said["requests"]
    lines.append(f"{requests['active']} requests under way, {requests['waiting_for_node']} of them without a node")
    if said["nodes"]:
        lines += ["", table(HEADER, [_row(node) for node in said["nodes"]])]
    lines += [f"not used: {reason}" for reason in said["unused"].values()]
    return "\n".join(lines)


def _row(node: dict[str, Any]) -> list[str]:
    pool, tiers, rate = node["kv_tokens"], node["tiers"], node["prefill_tokens_per_s"]
    return [
        node["node_id"],
        node["role"],
        node["state"],
        f"{node['running']:,}",
        f"{node['waiting']:,}",
        f"{node['waiting_tokens']:,}",
        f"{node['kv_used']:.0%} of {pool:,}" if pool else "-",
        f"{node['cached_tokens'] / node['prompt_tokens']:.0%}" if node["prompt_tokens"] else "-",
        _used(tiers, "host"),
        _used(tiers, "disk"),
        f"{rate:,}/s" if rate else "-",
    ]


def _used(tiers: dict[str, float], name: str) -> str:
    capacity = tiers.get(f"{name}_capacity", 0)
    return f"{tiers[f'{name}_blocks'] / capacity:.0%}" if capacity else "-"
