"""`tandem drain`, `tandem role` and `tandem trace`: what operators do to nodes, and ask of one request."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from tandem.deploy.bench.sse_client import HttpError, get_json, post_json
from tandem.deploy.explain import table
from tandem.deploy.pictures.waterfall import waterfall
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.work import LeaningName

POLL_S = 0.5  # between two looks at a node that drains; a guess


def run_drain(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 when the node still works after `wait_s`. Raises ConfigError."""
    if not arguments.node:
        raise ConfigError("name the node: tandem drain NODE; `tandem status` shows them")
    said = asyncio.run(_asked(arguments, _drain(arguments)))
    is_done = arguments.undo or not arguments.wait_s or not (said["running"] or said["waiting"])
    if arguments.json:
        print(json.dumps(said, indent=2))
    else:
        rest = f"; {said['running']:,} run there and {said['waiting']:,} wait"
        print(f"{said['node']} ({said['role']}) is {said['state']}{'' if arguments.undo else rest}")
        if said["warning"]:
            print(f"Mind: {said['warning']}.")
    return 0 if is_done else 1


def run_role(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError, also where the node can't have that role."""
    roles, role = get_args(LeaningName), arguments.new_role
    if not arguments.node or role not in roles:
        wrong = f"; {role!r} is no role" if role else ""
        raise ConfigError(f"name the node and its role: tandem role NODE {'|'.join(roles)}{wrong}")
    body = {"node": arguments.node, "role": role}
    said = asyncio.run(_asked(arguments, post_json(arguments.url, "/admin/role", body, arguments.api_key)))
    first = f", for {said['leaning']} first{' until told otherwise' if said['is_pinned'] else ''}"
    text = f"{said['node']} is a {said['role']} node{'' if said['leaning'] == said['role'] else first}"
    print(json.dumps(said, indent=2) if arguments.json else text)
    return 0


def run_trace(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError, also for a request that nobody remembers."""
    path = f"/admin/requests/{quote(arguments.request_id, safe='')}" if arguments.request_id else "/admin/requests"
    if arguments.picture and not arguments.request_id:
        raise ConfigError("--picture is of one request: tandem trace REQUEST_ID --picture FILE")
    said = asyncio.run(_asked(arguments, get_json(arguments.url, path, arguments.api_key)))
    if arguments.picture:
        try:
            Path(arguments.picture).write_text(waterfall(said["prompts"]))
        except OSError as error:
            raise ConfigError(f"can't write --picture {arguments.picture}: {error.strerror}") from None
    if arguments.json:
        print(json.dumps(said, indent=2))
    elif arguments.request_id:
        print("\n\n".join(as_story(prompt) for prompt in said["prompts"]))
    else:
        print(as_list(said["recent"]))
    return 0


async def _asked(arguments: argparse.Namespace, answer: Any) -> Any:
    """Awaits a router's answer. Raises ConfigError when the router refuses, or isn't there."""
    try:
        return await answer
    except HttpError as error:
        raise ConfigError(f"{arguments.url}: {error}") from None
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{arguments.url} does not answer as it should: {error}; check --url") from None


async def _drain(arguments: argparse.Namespace) -> dict[str, Any]:
    """Has the node drain, and looks at it until nothing is left there, or `wait_s` are over."""
    body = {"node": arguments.node, "undo": arguments.undo}
    said: dict[str, Any] = await post_json(arguments.url, "/admin/drain", body, arguments.api_key)
    end = time.monotonic() + arguments.wait_s
    while not arguments.undo and (said["running"] or said["waiting"]) and time.monotonic() < end:
        await asyncio.sleep(POLL_S)
        nodes = (await get_json(arguments.url, "/status", arguments.api_key))["nodes"]
        found = next((node for node in nodes if node["node_id"] == arguments.node), {"running": 0, "waiting": 0})
        said = {**said, "running": found["running"], "waiting": found["waiting"]}
    return said


def as_list(recent: list[dict[str, Any]]) -> str:
    """The newest requests, for people."""
    if not recent:
        return "no request yet"
    rows = [
        [each["id"], each["state"], f"{each['age_s']:,.0f} s", f"{each['prompt_tokens']:,}", _tokens(each),
         _ms(each["ttft_s"]), _ms(each["tpot_s"]), " → ".join(each["nodes"]) or "-"]
        for each in recent
    ]  # fmt: skip
    return table(["request", "state", "ago", "prompt", "output", "TTFT", "per token", "nodes"], rows)


def as_story(prompt: dict[str, Any]) -> str:
    """One prompt's story, for people: its sum, then each moment at its time after the request came."""
    head = (
        f"{prompt['id']}: {prompt['state']}, {prompt['prompt_tokens']:,} prompt tokens "
        f"({prompt['cached_tokens']:,} cached), {_tokens(prompt)} output tokens"
    )
    times = f"first token after {_ms(prompt['ttft_s'])}, each further one {_ms(prompt['tpot_s'])}"
    lines = [head, f"{times}, in all {_ms(prompt['duration_s'])}", ""]
    rows = [
        [f"{moment['at_s'] * 1e3:,.1f} ms", _ms(moment["lasts_s"] or None), moment["where"], moment["text"]]
        for moment in prompt["moments"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else []
    for at, lasts, where, text in rows:
        lines.append(f"{at.rjust(widths[0])}  {lasts.rjust(widths[1])}  {where.ljust(widths[2])}  {text}")
    if prompt["silent_nodes"]:
        lines.append(f"not heard of: {', '.join(prompt['silent_nodes'])}, which is lost or did not answer")
    return "\n".join(lines)


def _tokens(prompt: dict[str, Any]) -> str:
    return "-" if prompt["output_tokens"] is None else f"{prompt['output_tokens']:,}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"
