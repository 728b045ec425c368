"""`tandem bench --trace FILE`: replays a trace against running servers, over HTTP, at a speed factor.

Prompts are random tokens, equal where the trace's blocks are equal; a `cache_salt` of its own lets each replay begin
without hits of earlier ones. Hits by tier and busy seconds are what the nodes counted meanwhile, for anybody.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from tandem.deploy.bench.load import request_once
from tandem.deploy.bench.node_figures import (
    Cluster,
    added,
    capacity_tokens,
    hits_by_tier,
    imbalance_by_role,
    read_nodes,
    read_when_still,
)
from tandem.deploy.bench.report import publish
from tandem.deploy.bench.request_times import RequestTimes, summarize
from tandem.deploy.bench.sse_client import HttpError, model_to_ask, post_json
from tandem.deploy.bench.trace import TraceRequest, faster, pooled_hit_rate, read_trace
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import Targets


def run(arguments: argparse.Namespace) -> int:
    """Prints a report. Returns 1 when a request failed. Raises ConfigError when server or trace can't be read."""
    requests = faster(read_trace(arguments.trace, arguments.limit), arguments.speed)
    runs: dict[str, list[RequestTimes]] = {}
    reports = [asyncio.run(_replay(arguments, url, requests, runs)) for url in (arguments.url, *arguments.compare)]
    report = {**reports[0], **({"compared_with": reports[1:]} if arguments.compare else {})}
    publish(report, arguments, runs)
    return 1 if any(each["num_failed"] for each in reports) else 0


async def _replay(
    arguments: argparse.Namespace, url: str, requests: Sequence[TraceRequest], runs: dict[str, list[RequestTimes]]
) -> dict[str, Any]:
    """Replays the trace against one server. Returns the report, and adds the times to `runs`."""
    key = arguments.api_key
    try:
        model = await model_to_ask(url, key, arguments.model)
        body = {"model": model, "prompt": [0], "max_tokens": 1}
        placement = (await post_json(url, "/explain", body, key))["placement"]
        before = await read_nodes(url, key)
    except (OSError, HttpError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not answer as it should: {error}; check --url and --api-key") from None
    started = time.monotonic()
    samples = runs[url] = await _ask_all(arguments, url, model, requests)
    duration_s = time.monotonic() - started
    after = await read_when_still(url, key)
    capacity = sum(capacity_tokens(node) for node in after.values()) / arguments.trace_scale
    return {
        "url": url,
        "model": model,
        "placement": placement,
        **summarize(samples, duration_s),
        **goodput(samples, duration_s, Targets(arguments.ttft_target, arguments.tpot_target)),
        **summarize_hits(samples, before, after),
        "hit_rate_bound": round(pooled_hit_rate(requests, int(capacity)), 4),  # one LRU cache of all nodes' memory
        **summarize_loads(before, after),
    }


async def _ask_all(
    arguments: argparse.Namespace, url: str, model: str, requests: Sequence[TraceRequest]
) -> list[RequestTimes]:
    started, first, salt = time.monotonic(), requests[0].arrival_s, secrets.token_hex(8)
    tasks = []
    for request in requests:
        body = {**make_body(arguments, model, request), "cache_salt": salt}
        await asyncio.sleep(max(0.0, started + request.arrival_s - first - time.monotonic()))
        tasks.append(asyncio.ensure_future(request_once(url, body, arguments.api_key, arguments.timeout)))
    return list(await asyncio.gather(*tasks))


def make_body(arguments: argparse.Namespace, model: str, request: TraceRequest) -> dict[str, Any]:
    """The body that asks for a request of the trace. `--trace-scale` shrinks prompts and answers alike, for models of
    short context."""
    return {
        "model": model,
        "prompt": request.token_ids(arguments.vocab_size, arguments.trace_scale),
        "max_tokens": max(1, round(request.num_output_tokens * arguments.trace_scale)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def goodput(samples: Sequence[RequestTimes], duration_s: float, targets: Targets) -> dict[str, float]:
    """Rate and share of requests that ended well and within both targets. Answers of one token have no time per
    token."""
    ended = [sample for sample in samples if not sample.error and sample.event_times]
    good = [s for s in ended if s.ttft_s <= targets.ttft_s and (s.num_tokens < 2 or s.tpot_s <= targets.tpot_s)]
    return {"goodput_per_s": round(len(good) / duration_s, 3), "good_share": round(len(good) / len(samples), 4)}


def summarize_hits(samples: Sequence[RequestTimes], before: Cluster, after: Cluster) -> dict[str, Any]:
    """Shares of all prompt tokens: `hit_rate` as the answers say it, by tier as the nodes counted."""
    ended = [sample for sample in samples if not sample.error]
    total = sum(sample.num_prompt_tokens for sample in ended)
    tiers = hits_by_tier(before, after)
    return {
        "hit_rate": round(sum(sample.num_cached_tokens for sample in ended) / total, 4) if total else 0.0,
        "hit_rate_by_tier": {tier: round(tokens / total, 4) if total else 0.0 for tier, tokens in tiers.items()},
    }


def summarize_loads(before: Cluster, after: Cluster) -> dict[str, Any]:
    busy = added(before, after, "busy_s")
    found = added(before, after, "cached_tokens")
    computed = {name: tokens - found[name] for name, tokens in added(before, after, "prompt_tokens").items()}
    return {
        "busy_s_by_node": {name: round(seconds, 3) for name, seconds in sorted(busy.items())},
        "computed_tokens_by_node": {name: int(tokens) for name, tokens in sorted(computed.items())},
        "load_imbalance": imbalance_by_role(busy, after),
    }
