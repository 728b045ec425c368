"""`tandem profile`: has a server's nodes profile themselves, then prints and writes what they found."""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.bench.sse_client import HttpError, post_json
from tandem.deploy.profile.picture import picture
from tandem.deploy.profile.text import text
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.profile import ProfileReport


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 when some node has no profile. Raises ConfigError when the server doesn't answer, or nothing can
    be written."""
    try:
        nodes = asyncio.run(_profile(arguments))
    except (OSError, HttpError, ValueError, LookupError) as error:
        check = "check URL and --api-key, which needs the scope admin"
        raise ConfigError(f"{arguments.url} does not answer as it should: {error}; {check}") from None
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shown = [_show(node, folder) for node in nodes]
    except OSError as error:
        raise ConfigError(f"can't write to {folder}: {error.strerror}; choose another folder with --output") from None
    return 0 if all(shown) else 1


async def _profile(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The answers of the nodes to /profile/stop."""
    url, key = arguments.url, arguments.api_key
    body = {"seconds": arguments.seconds, "steps": arguments.steps, "layers": arguments.layers}
    started = (await post_json(url, "/profile/start", body, key))["nodes"]
    for node in started:
        if node["error"]:
            print(f"tandem: {node['node_id']}: {node['error']}", file=sys.stderr)
    names = ", ".join(node["node_id"] for node in started if not node["error"])
    if not names:
        return []
    print(f"profiling {names} for {arguments.seconds:g} s, at most {arguments.steps} steps", file=sys.stderr)
    await asyncio.sleep(arguments.seconds)
    nodes: list[dict[str, Any]] = (await post_json(url, "/profile/stop", {}, key))["nodes"]
    return nodes


def _show(node: dict[str, Any], folder: Path) -> bool:
    """Prints one node's report and writes its files. False: it has none."""
    if node["error"]:
        print(f"tandem: {node['node_id']}: {node['error']}", file=sys.stderr)
        return False
    report = msgspec.convert(node["report"], ProfileReport)
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in report.node_id)
    files = {f"{name}.json": msgspec.json.format(msgspec.json.encode(report)), f"{name}.svg": picture(report).encode()}
    if node["trace"]:
        files[f"{name}.trace.json.gz"] = base64.b64decode(node["trace"])
    print(text(report))
    for file, content in files.items():
        (folder / file).write_bytes(content)
    print(f"written to {folder}: {', '.join(files)}\n")
    return True
