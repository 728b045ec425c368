"""`tandem bench --trace FILE`: replays a trace against a running server, over HTTP, at a speed factor.

Prompts are random tokens, equal where the trace's blocks are equal. Hits are what the server says it found
(`prompt_tokens_details.cached_tokens`); loads are the prompt tokens left to compute, by the nodes that the header
`X-Tandem-Placement` names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.deploy.bench import Sample, request_once, summarize
from tandem.deploy.sse_client import HttpError, get_json
from tandem.deploy.trace import TraceRequest, faster, pooled_hit_rate, read_trace
from tandem.engine.errors import ConfigError

# The node that computes the prompt: of "prompt=p0 … tokens=d0 …" the first, else the one that does "all".
_COMPUTES = re.compile(r"\b(?:prompt|all)=(\S+)")


def run(arguments: argparse.Namespace) -> int:
    """Prints a report as JSON; 1 when a request failed. Raises ConfigError when server or trace can't be read."""
    requests = faster(read_trace(arguments.trace, arguments.limit), arguments.speed)
    report = asyncio.run(_replay(arguments, requests))
    print(json.dumps(report, indent=2))
    return 1 if report["num_failed"] else 0


async def _replay(arguments: argparse.Namespace, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    try:
        model = arguments.model or (await get_json(arguments.url, "/v1/models", arguments.api_key))["data"][0]["id"]
    except (OSError, HttpError, ValueError, LookupError) as error:
        raise ConfigError(f"{arguments.url} does not answer as a server should: {error}; check --url") from None
    started, first = time.monotonic(), requests[0].arrival_s
    tasks = []
    for request in requests:
        body = make_body(arguments, model, request)
        await asyncio.sleep(max(0.0, started + request.arrival_s - first - time.monotonic()))
        tasks.append(asyncio.ensure_future(request_once(arguments.url, body, arguments.api_key, arguments.timeout)))
    samples = list(await asyncio.gather(*tasks))
    bound = pooled_hit_rate(requests, 0)
    return {"model": model, **summarize(samples, time.monotonic() - started), **summarize_hits(samples, bound)}


def make_body(arguments: argparse.Namespace, model: str, request: TraceRequest) -> dict[str, Any]:
    """`--trace-scale` shrinks prompts and answers alike, for models of short context."""
    return {
        "model": model,
        "prompt": request.token_ids(arguments.vocab_size, arguments.trace_scale),
        "max_tokens": max(1, round(request.num_output_tokens * arguments.trace_scale)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def summarize_hits(samples: Sequence[Sample], bound: float) -> dict[str, Any]:
    good = [sample for sample in samples if not sample.error]
    loads: Counter[str] = Counter()
    for sample in good:
        node = _COMPUTES.search(sample.headers.get(b"x-tandem-placement", b"").decode("latin-1"))
        if node is not None:
            loads[node.group(1)] += sample.num_prompt_tokens - sample.num_cached_tokens
    total = sum(sample.num_prompt_tokens for sample in good)
    mean = sum(loads.values()) / len(loads) if loads else 0
    return {
        "hit_rate": round(sum(sample.num_cached_tokens for sample in good) / total, 4) if total else 0.0,
        "hit_rate_bound": round(bound, 4),  # one cache without limit
        "computed_tokens_by_node": dict(sorted(loads.items())),
        "load_imbalance": round(max(loads.values()) / mean, 3) if mean else 1.0,
    }
