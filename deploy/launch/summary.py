"""A summary of a serving cluster, in a few lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary(model: str, url: str, ready_lines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines on the cluster. `ready_lines`: what each child said when it served; a child that tells of KV is a node
    (`node/report.py`)."""
    nodes = {name: said for name, said in ready_lines.items() if "num_kv_tokens" in said}
    if not nodes:
        return []
    context = min(said["max_model_len"] for said in nodes.values())
    width = max(map(len, nodes))
    return [
        f"{model} answers up to {context:,} tokens of prompt and output",
        *(f"  {name:{width}}  {_describe(said)}" for name, said in nodes.items()),
        *(f"  {name} at {said['host']}:{said['port']}" for name, said in ready_lines.items() if "host" in said),
        f"  API at {url}/v1 (docs/http.md), figures at {url}/metrics; try: tandem chat --url {url}",
    ]


def _describe(said: Mapping[str, Any]) -> str:
    return f"{said['device']}, {said['dtype']}, KV of {said['num_kv_tokens']:,} tokens in {_size(said['kv_bytes'])}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
