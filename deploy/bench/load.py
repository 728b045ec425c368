"""`tandem bench`: streams completions or chats from a server and reports latencies and throughput.

Closed loop (a fixed number in flight) or open loop (Poisson arrivals, which show queueing honestly).

    ttft_s  request sent -> first token        itl_s  gaps between the events of a stream
    e2e_s   request sent -> end of stream      tpot_s (last token - first token) / (tokens - 1), per request
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

from tandem.deploy.bench.report import publish
from tandem.deploy.bench.request_times import RequestTimes, summarize
from tandem.deploy.bench.sse_client import HttpError, model_to_ask, stream_events
from tandem.deploy.bench.workload import make_bodies

DEFAULT_CONCURRENCY = 8  # a guess
T = TypeVar("T")


@dataclass
class Measurement:
    """The measurements so far, which a Ctrl-C leaves in place."""

    samples: list[RequestTimes] = field(default_factory=list)  # in the order of their ends
    model: str = ""
    started_at: float = 0.0

    def report(self) -> dict[str, Any]:
        return summarize(self.samples, time.monotonic() - self.started_at) | {"model": self.model}


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns 1 when a request failed, 130 when Ctrl-C ended it: the report then has what had ended.
    Raises ConfigError when the server can't be reached."""
    measured = Measurement()
    is_whole = False
    try:
        asyncio.run(_measure(arguments, measured))
        is_whole = True
    except KeyboardInterrupt:
        if not measured.samples:
            raise
    report = measured.report() | ({} if is_whole else {"interrupted": True})
    publish(report, arguments, {arguments.url: measured.samples})
    return (1 if report["num_failed"] else 0) if is_whole else 130


async def _measure(arguments: argparse.Namespace, measured: Measurement) -> None:
    measured.model = await model_to_ask(arguments.url, arguments.api_key, arguments.model)
    bodies = make_bodies(arguments, measured.model)
    # Standard error, where people watch; rates are those of the report.
    with tqdm(total=len(bodies), unit="request", disable=not sys.stderr.isatty()) as bar:

        async def one(body: dict[str, Any]) -> RequestTimes:
            sample = await request_once(arguments.url, body, arguments.api_key, arguments.timeout)
            measured.samples.append(sample)
            bar.update()
            return sample

        measured.started_at = time.monotonic()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_send(one, bodies, arguments), arguments.max_seconds or None)


async def _send(
    one: Callable[[dict[str, Any]], Awaitable[RequestTimes]],
    bodies: list[dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    most = arguments.concurrency or (len(bodies) if arguments.rate else DEFAULT_CONCURRENCY)
    if 0 < arguments.rate < math.inf:
        free = asyncio.Semaphore(most)

        async def when_free(body: dict[str, Any]) -> RequestTimes:
            async with free:
                return await one(body)

        await open_loop(when_free, bodies, arguments.rate, random.Random(arguments.seed + 1))
    else:
        await closed_loop(one, bodies, most)


async def request_once(url: str, body: dict[str, Any], api_key: str = "", timeout_s: float = 600.0) -> RequestTimes:
    """Streams one completion or, with `messages`, one chat. `body` asks for `stream` and for usage."""
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
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async for data in stream_events(url, path, body, api_key, sample.headers):
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise HttpError(event["error"].get("message", "the stream ended with an error"))
        if any(map(_has_tokens, event.get("choices") or ())):
            sample.event_times.append(time.monotonic())
        if event.get("usage"):
            usage = event["usage"]
            sample.num_tokens, sample.num_prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens", 0)
            sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    raise HttpError("the stream ended without [DONE]")


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event brings tokens: a chat's first one only says who speaks."""
    delta = choice.get("delta")
    return delta is None or any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


async def closed_loop(
    one: Callable[[T], Awaitable[RequestTimes]], bodies: Sequence[T], concurrency: int
) -> list[RequestTimes]:
    """Sends requests with `concurrency` of them in flight; returns the samples in the order of their ends."""
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
    """Sends requests by Poisson arrivals, `rate` a second; returns the samples in the order of `bodies`."""
    tasks, send_at = [], time.monotonic()
    for body in bodies:
        await asyncio.sleep(max(0.0, send_at - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(body)))
        send_at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))
