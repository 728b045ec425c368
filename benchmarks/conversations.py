"""Conversations of many turns against a running server: what a turn's first token costs once the rest is cached.

    python benchmarks/conversations.py --url http://127.0.0.1:8000 [--sessions 64] [--turns 8] [--tokens 2000]
                                       [--answer 16] [--concurrency 1]

Each turn sends the whole conversation so far, with the answers that came, and `--tokens` new random token ids. All
sessions take turn 1, then all take turn 2, and so on, so that a session's cache entries are as old as can be when it
comes back. Printed for each turn: time to first token of

- cold: a prompt of that length that nobody has seen,
- fresh: the turn of a conversation whose last turn was a moment ago (its new tokens at that context, surely cached),
- turn: the sessions' (p50, p90), its ratio to the other two, and the share of the prompt that was found cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tandem.deploy.bench.request_times import percentile
from tandem.deploy.bench.sse_client import get_json, stream_events

NUM_SAMPLES = 1  # of cold and fresh prompts: they, too, take room in the caches
VOCABULARY = (100, 2000)


@dataclass
class Answer:
    """What came of one request. `cached_share`: the part of its prompt that was found cached."""

    ttft_s: float
    token_ids: list[int]
    cached_share: float


@dataclass
class Session:
    """One conversation: all of its tokens so far, and where its new ones come from."""

    random: random.Random
    token_ids: list[int] = field(default_factory=list)

    def say(self, num_tokens: int) -> None:
        self.token_ids += [self.random.randrange(*VOCABULARY) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Client:
    """Asks one server for `num_answer` tokens at a time."""

    url: str
    model: str
    num_answer: int

    async def ask(self, prompt: list[int]) -> Answer:
        """Sends a prompt and measures its answer. Raises RuntimeError when the stream ends with an error or without
        usage."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.num_answer, "temperature": 0.0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                "return_token_ids": True}  # fmt: skip
        began = time.perf_counter()
        first, token_ids, usage = 0.0, [], None
        async for data in stream_events(self.url, "/v1/completions", body):
            if data == b"[DONE]":
                break
            event: dict[str, Any] = json.loads(data)
            if event.get("error"):
                raise RuntimeError(f"the server broke off: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                first = first or time.perf_counter() - began
                token_ids += choice.get("token_ids") or ()
        if usage is None:
            raise RuntimeError("no usage came")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer(first, token_ids, cached / len(prompt))

    async def turn(self, session: Session, num_tokens: int) -> Answer:
        session.say(num_tokens)
        answer = await self.ask(session.token_ids)
        session.token_ids += answer.token_ids
        return answer


async def cold_and_fresh(client: Client, turn: int, tokens: int) -> tuple[float, float]:
    """Medians of the time to first token, in seconds: of new prompts as long as the turn's, and of the turn of a
    conversation that has just had the turn before."""
    cold, fresh = [], []
    for sample in range(NUM_SAMPLES):
        session = Session(random.Random(f"{time.time()} {sample}"))
        if turn > 1:
            await client.turn(session, (turn - 1) * (tokens + client.num_answer) - client.num_answer)
        fresh.append((await client.turn(session, tokens)).ttft_s)
        new = Session(random.Random(f"cold {time.time()} {sample}"))
        cold.append((await client.turn(new, turn * (tokens + client.num_answer) - client.num_answer)).ttft_s)
    return statistics.median(cold), statistics.median(fresh)


async def run(client: Client, sessions: list[Session], turns: int, tokens: int, concurrency: int) -> None:
    print(f"{'turn':>4} {'tokens':>7} {'cold':>8} {'fresh':>8} {'p50':>8} {'p90':>8} {'of cold':>8} {'of fresh':>9} "
          f"{'cached':>7}   ms")  # fmt: skip
    limit = asyncio.Semaphore(concurrency)

    async def one(session: Session) -> Answer:
        async with limit:
            return await client.turn(session, tokens)

    for turn in range(1, turns + 1):
        cold, fresh = await cold_and_fresh(client, turn, tokens)
        answers = await asyncio.gather(*(one(session) for session in sessions))
        ttfts = [answer.ttft_s for answer in answers]
        p50, p90 = statistics.median(ttfts), percentile(ttfts, 90)
        cached = statistics.mean(answer.cached_share for answer in answers)
        print(f"{turn:4} {len(sessions[0].token_ids):7} {cold * 1e3:8.1f} {fresh * 1e3:8.1f} {p50 * 1e3:8.1f} "
              f"{p90 * 1e3:8.1f} {p50 / cold:8.0%} {p50 / fresh:9.2f} {cached:7.0%}", flush=True)  # fmt: skip


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="new tokens a turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--concurrency", type=int, default=1, help="sessions that wait for an answer at once")
    given = parser.parse_args()
    models = await get_json(given.url, "/v1/models")
    client = Client(given.url, models["data"][0]["id"], given.answer)
    sessions = [Session(random.Random(f"{time.time()} session {index}")) for index in range(given.sessions)]
    await run(client, sessions, given.turns, given.tokens, given.concurrency)


if __name__ == "__main__":
    asyncio.run(main())
