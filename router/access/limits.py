"""How much a key may ask for: requests and tokens a minute, requests at a time. In one process.

What a minute allows comes back evenly, and a key that rested for a minute may use it at once. Tokens are charged when
their number is known, at a request's end; until what was used beyond the limit has come back, the next one waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tandem.engine.contracts.errors import RateLimitError
from tandem.router.access.api_keys import Caller
from tandem.router.access.keys_file import KeyLimits

BUSY_S = 1.0  # a guess: when to try again while others of the key run


@dataclass(slots=True)
class Permit:
    """Leave for one request to run. `num_tokens` is what it has used, known at its end."""

    caller: Caller
    request_id: str
    num_tokens: int = 0

    def charge(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens


class RequestLimits(Protocol):
    """Whoever counts what keys use: this process alone, or Redis for several."""

    async def enter(self, permit: Permit, limits: KeyLimits) -> None:
        """Lets a request in. Raises RateLimitError, which says when to try again."""

    async def leave(self, permit: Permit, limits: KeyLimits) -> None: ...


@dataclass(slots=True)
class Usage:
    """What one key has left of its minute, as of `at` (seconds of the clock), and which of its requests run."""

    at: float
    requests: float
    tokens: float
    running: set[str] = field(default_factory=set)


class LocalLimits:
    """Limits that count only what this process has let in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    async def enter(self, permit: Permit, limits: KeyLimits) -> None:
        usage = self._current(permit.caller.name, limits)
        if limits.concurrent_requests is not None and len(usage.running) >= limits.concurrent_requests:
            raise refusal("requests at a time", limits.concurrent_requests)
        if limits.requests_per_minute is not None and usage.requests < 1:
            raise refusal("requests a minute", limits.requests_per_minute, usage.requests)
        if limits.tokens_per_minute is not None and usage.tokens < 1:
            raise refusal("tokens a minute", limits.tokens_per_minute, usage.tokens)
        usage.requests -= 1
        usage.running.add(permit.request_id)

    async def leave(self, permit: Permit, limits: KeyLimits) -> None:
        usage = self._current(permit.caller.name, limits)
        usage.running.discard(permit.request_id)
        usage.tokens -= permit.num_tokens

    def _current(self, name: str, limits: KeyLimits) -> Usage:
        now, requests, tokens = self._clock(), limits.requests_per_minute or 0, limits.tokens_per_minute or 0
        usage = self._usage.setdefault(name, Usage(now, requests, tokens))
        minutes, usage.at = (now - usage.at) / 60, now
        usage.requests = min(requests, usage.requests + minutes * requests)
        usage.tokens = min(tokens, usage.tokens + minutes * tokens)
        return usage


def refusal(what: str, most: int, left: float | None = None) -> RateLimitError:
    """The error for a limit of `most`. `left` is what a limit by the minute has left; None: a limit at a time."""
    wait_s = BUSY_S if left is None else (1 - left) * 60 / most
    return RateLimitError(f"this API key may have {most} {what}; try again later", retry_after_s=wait_s)
