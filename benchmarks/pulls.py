"""What pulling a prefix from a peer takes beside computing it: two single nodes, a router that takes turns, Redis.

    python benchmarks/pulls.py MODEL [--lengths 2048 8192] [--ends 64 1024] [--rounds 4] [-- node options, such as
                                     --load-format dummy]

A round sends a prompt that nobody has seen to one node (computed), then one with the same prefix and an end of its own
to the other node (pulled), then another such prompt to the first node (hit). Printed for each length of prompts and of
their ends: medians of the time to first token, the bytes a second of the pulls alone, from question to commit.

Then rounds in which both nodes get the second prompt at once, so that one pulls what the other has and both compute the
same end behind it: how many rounds had other tokens, and by how much the first token's log-probabilities differ at
most. One node a GPU where there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from servers import node_counters, two_single_nodes

from tandem.deploy.bench.sse_client import stream_events

PUBLISHED_S = 0.6  # the directory hears of blocks in batches
APART_S = 0.002  # two requests "at once" whose order is certain


async def ask(url: str, prompt: Sequence[int]) -> float:
    """Seconds to the first token."""
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    began, took = time.perf_counter(), 0.0
    async for _ in stream_events(url, "/v1/completions", body):
        took = took or time.perf_counter() - began
    await asyncio.sleep(PUBLISHED_S)
    return took


async def tokens_of(url: str, prompt: Sequence[int], after_s: float) -> tuple[list[int], float]:
    """The tokens of the answer, and the log-probability of the first."""
    await asyncio.sleep(after_s)
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "logprobs": 1}  # fmt: skip
    tokens: list[int] = []
    logprobs: list[float] = []
    async for data in stream_events(url, "/v1/completions", body):
        for choice in json.loads(data)["choices"] if data != b"[DONE]" else ():
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
    return tokens, logprobs[0]


@dataclass
class Times:
    """Seconds to first token."""

    computed: list[float] = field(default_factory=list)
    pulled: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    num_differing: int = 0  # compared rounds
    widest: float = 0.0  # difference of log-probabilities


def prompts(count: int, length: int, end: int, rng: random.Random) -> list[list[int]]:
    """Prompts of one prefix and an end each."""
    prefix = [rng.randrange(100, 400) for _ in range(length - end)]
    return [[*prefix, *(rng.randrange(100, 400) for _ in range(end))] for _ in range(count)]


async def timed_round(url: str, length: int, end: int, rng: random.Random, times: Times) -> None:
    first, second, third = prompts(3, length, end, rng)
    times.computed.append(await ask(url, first))
    before = node_counters(url)
    took = await ask(url, second)
    after = node_counters(url)
    names = ("pull_completed", "pull_seconds", "kv_pushed_bytes")
    gained = {name: after[name] - before[name] for name in names}
    if gained["pull_completed"] == 1:
        times.pulled.append(took)
        times.bytes_per_s.append(gained["kv_pushed_bytes"] / gained["pull_seconds"])
    times.hit.append(await ask(url, third))


async def compared_round(url: str, length: int, end: int, rng: random.Random, times: Times) -> None:
    first, second = prompts(2, length, end, rng)
    await ask(url, first)
    pulled, own = await asyncio.gather(*(tokens_of(url, second, after_s) for after_s in (0.0, APART_S)))
    times.num_differing += pulled[0] != own[0]
    times.widest = max(times.widest, abs(pulled[1] - own[1]))


def shown(values: Sequence[float], scale: float) -> str:
    return f"{statistics.median(values) * scale:10.1f}" if values else f"{'-':>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--ends", type=int, nargs="+", default=[64, 1024], help="tokens of each prompt after its prefix"
    )
    known = sys.argv[1:]
    options = known[known.index("--") + 1 :] if "--" in known else []
    arguments = parser.parse_args(known[: known.index("--")] if "--" in known else known)
    rng = random.Random(1)
    cases = [(length, end) for length in arguments.lengths for end in arguments.ends if end < length]
    with two_single_nodes(arguments.model, options, "round_robin") as (url, _):
        for case in cases:  # both nodes measure their rates, kernels and channels are made
            asyncio.run(timed_round(url, *case, rng, Times()))
        titles = f"{'prompt':>8}{'end':>7}{'computed':>10}{'pulled':>10}{'hit':>10}  ms to first token{'GB/s':>10}"
        print(f"{titles}  pulls; other tokens, logprobs")
        for length, end in cases:
            times = Times()
            for _ in range(arguments.rounds):
                asyncio.run(timed_round(url, length, end, rng, times))
            for _ in range(arguments.rounds):
                asyncio.run(compared_round(url, length, end, rng, times))
            columns = "".join(shown(each, 1e3) for each in (times.computed, times.pulled, times.hit))
            counts = f"{len(times.pulled)} of {arguments.rounds}; {times.num_differing}, {times.widest:.2g}"
            print(f"{length:8}{end:7}{columns}{'':19}{shown(times.bytes_per_s, 1e-9)}  {counts}", flush=True)


if __name__ == "__main__":
    main()
