"""The same limits over all routers of a cluster, counted in Redis; while that is away each process counts by itself."""

from __future__ import annotations

import asyncio
import logging

from redis import RedisError

from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.directory.servers import AsyncRedisServers
from tandem.router.access.keys_file import KeyLimits
from tandem.router.access.limits import LocalLimits, Permit, refusal

repeated = RateLimited(logging.getLogger(__name__))

IO_TIMEOUT_S = 0.25  # a guess: a request waits no longer for what is only a count
REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)
WHAT = ("requests at a time", "requests a minute", "tokens a minute")

# KEYS: a key's usage, its running requests. ARGV: the three limits in WHAT's order (0: none), the longest that a
# request may run in seconds, its id. Returns which limit is reached (0: none) and what is left of it.
ENTER = """
local now = redis.call('TIME')
now = now[1] + now[2] / 1e6
local minutes = (now - (tonumber(redis.call('HGET', KEYS[1], 'at')) or now)) / 60
local function left(field, most)
  return math.min(most, (tonumber(redis.call('HGET', KEYS[1], field)) or most) + minutes * most)
end
local at_once, requests, tokens = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if at_once > 0 and redis.call('ZCARD', KEYS[2]) >= at_once then return {1, '0'} end
local requests_left, tokens_left = left('requests', requests), left('tokens', tokens)
if requests > 0 and requests_left < 1 then return {2, tostring(requests_left)} end
if tokens > 0 and tokens_left < 1 then return {3, tostring(tokens_left)} end
redis.call('HSET', KEYS[1], 'at', tostring(now))
redis.call('HSET', KEYS[1], 'requests', tostring(requests_left - 1), 'tokens', tostring(tokens_left))
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[5])
redis.call('EXPIRE', KEYS[1], 86400)
redis.call('EXPIRE', KEYS[2], 86400)
return {0, '0'}
"""
# KEYS: as before. ARGV: the request's id, its tokens.
LEAVE = """
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', -ARGV[2])
"""


class SharedLimits:
    """Limits counted in Redis. After `longest_s` seconds a request counts as over, should its router have died."""

    def __init__(self, url: str, namespace: str, longest_s: float) -> None:
        self._servers = AsyncRedisServers(url, IO_TIMEOUT_S)
        self._namespace, self._longest_s = namespace, longest_s
        self._local = LocalLimits()
        self._is_local: set[str] = set()  # requests that were let in without Redis

    async def enter(self, permit: Permit, limits: KeyLimits) -> None:
        given = (limits.concurrent_requests, limits.requests_per_minute, limits.tokens_per_minute)
        arguments = [*(most or 0 for most in given), self._longest_s, permit.request_id]
        try:
            which, left = await self._servers.client.eval(ENTER, 2, *self._keys(permit), *arguments)
        except REDIS_ERRORS as error:
            repeated.warning("limits of keys are counted by each process alone: Redis says %s", error)
            await self._local.enter(permit, limits)
            self._is_local.add(permit.request_id)
            return
        if which:
            most = given[which - 1]
            assert most is not None
            raise refusal(WHAT[which - 1], most, float(left) if which > 1 else None)

    async def leave(self, permit: Permit, limits: KeyLimits) -> None:
        if permit.request_id in self._is_local:
            self._is_local.discard(permit.request_id)
            await self._local.leave(permit, limits)
            return
        try:
            await self._servers.client.eval(LEAVE, 2, *self._keys(permit), permit.request_id, permit.num_tokens)
        except REDIS_ERRORS as error:
            repeated.warning("what a key has used can't be counted: Redis says %s", error)

    def _keys(self, permit: Permit) -> tuple[str, str]:
        start = f"{self._namespace}:{{{permit.caller.name}}}"
        return f"{start}:usage", f"{start}:running"

    async def close(self) -> None:
        await self._servers.aclose()
