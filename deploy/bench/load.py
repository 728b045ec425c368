"""`tandem bench`: streams completions from a server and prints latencies and throughput as JSON.

Closed loop (a fixed number in flight) or open loop (Poisson arrivals, which show queueing honestly). Prompts are
random token ids, so nothing is tokenized and nothing but `--shared-prefix` hits a cache.

    ttft_s  request sent -> first token        itl_s  gaps between the events of a stream
    e2e_s   request sent -> end of stream      tpot_s (last token - first token) / (tokens - 1), per request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.deploy.bench.sse_client import HttpError, model_to_ask, stream_events

PERCENTILES = (50, 90, 99)
T = TypeVar("T")


@dataclass
class RequestTimes:
    """What one request showed. Times in seconds on the monotonic clock."""

    sent_at: float
    event_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, by what the server says
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of the answer, names in lower case
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """NaN when no token came."""
        return self.event_times[0] - self.sent_at if self.event_times else math.nan

    @property
    def tpot_s(self) -> float:
        """NaN with fewer than two tokens."""
        return (self.event_times[-1] - self.event_times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else math.nan


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 when a request failed. Raises ConfigError when the server can't be reached."""
    report = asyncio.run(_measure(arguments))
    print(json.dumps(report, indent=2))
    return 1 if report["num_failed"] else 0


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = await model_to_ask(arguments.url, arguments.api_key, arguments.model)
    bodies = make_bodies(arguments, model)
    started = time.monotonic()

    async def one(body: dict[str, Any]) -> RequestTimes:
        return await request_once(arguments.url, body, arguments.api_key, arguments.timeout)

    if arguments.rate > 0:
        samples = await open_loop(one, bodies, arguments.rate, random.Random(arguments.seed + 1))
    else:
        samples = await closed_loop(one, bodies, arguments.concurrency)
    return summarize(samples, time.monotonic() - started) | {"model": model}


def make_bodies(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    rng = random.Random(arguments.seed)

    def random_ids(number: int) -> list[int]:
        return [rng.randrange(arguments.vocab_size) for _ in range(number)]

    shared = random_ids(min(arguments.shared_prefix, arguments.input_tokens))
    return [
        {
            "model": model,
            "prompt": shared
            + [rng.randrange(arguments.vocab_size) for _ in range(arguments.input_tokens - len(shared))],
            "max_tokens": arguments.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(arguments.num_requests)
    ]


async def request_once(url: str, body: dict[str, Any], api_key: str = "", timeout_s: float = 600.0) -> RequestTimes:
    """Streams one completion. `body` asks for `stream` and for usage."""
    sample = RequestTimes(sent_at=time.monotonic())
    try:
        await asyncio.wait_for(_follow(url, body, api_key, sample), timeout_s)
    except asyncio.TimeoutError:
        sample.error = f"no end within {timeout_s:g} s"
    except (OSError, HttpError, ValueError, EOFError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.ended_at = time.monotonic()
    return sample


async def _follow(url: str, body: dict[str, Any], api_key: str, sample: RequestTimes) -> None:
    async for data in stream_events(url, "/v1/completions", body, api_key, sample.headers):
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise HttpError(event["error"].get("message", "the stream ended with an error"))
        if event.get("choices"):
            sample.event_times.append(time.monotonic())
        if event.get("usage"):
            usage = event["usage"]
            sample.num_tokens, sample.num_prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens", 0)
            sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    raise HttpError("the stream ended without [DONE]")


async def closed_loop(
    one: Callable[[T], Awaitable[RequestTimes]], bodies: Sequence[T], concurrency: int
) -> list[RequestTimes]:
    """`concurrency` in flight; the samples in the order of their ends."""
    waiting = iter(bodies)
    samples: list[RequestTimes] = []

    async def worker() -> None:
        for body in waiting:
            samples.append(await one(body))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return samples


async def open_loop(
    one: Callable[[T], Awaitable[RequestTimes]], bodies: Sequence[T], rate: float, rng: random.Random
) -> list[RequestTimes]:
    """Poisson arrivals, `rate` a second; the samples in the order of `bodies`."""
    tasks, send_at = [], time.monotonic()
    for body in bodies:
        await asyncio.sleep(max(0.0, send_at - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(body)))
        send_at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def summarize(samples: Sequence[RequestTimes], duration_s: float) -> dict[str, Any]:
    """The report over all requests; failed ones count as failed and nowhere else."""
    good = [sample for sample in samples if not sample.error and sample.event_times]
    gaps = [later - earlier for s in good for earlier, later in zip(s.event_times, s.event_times[1:], strict=False)]
    per_token = [s.tpot_s for s in good if s.num_tokens > 1]
    num_tokens = sum(sample.num_tokens for sample in good)
    return {
        "num_requests": len(samples),
        "num_failed": len(samples) - len(good),
        "errors": sorted({sample.error or "no token came" for sample in samples if sample not in good})[:5],
        "duration_s": round(duration_s, 4),
        "requests_per_s": round(len(good) / duration_s, 3),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / duration_s, 2),
        "ttft_s": distribution([s.ttft_s for s in good]),
        "itl_s": distribution(gaps),
        "tpot_s": distribution(per_token),
        "e2e_s": distribution([s.ended_at - s.sent_at for s in good]),
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, nearest-rank percentiles and maximum, rounded to microseconds; empty without values."""
    if not values:
        return {}
    ranks = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    summary = {"mean": sum(values) / len(values), **ranks, "max": max(values)}
    return {name: round(value, 6) for name, value in summary.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; NaN without values."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1] if values else math.nan
