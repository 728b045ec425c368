"""Opens what a router learns nodes and cached prefixes from: Redis, when it is given one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tandem.engine.contracts.config import RouterOptions
from tandem.router.process.worker import Sources


@contextlib.asynccontextmanager
async def open_sources(options: RouterOptions) -> AsyncIterator[Sources]:
    """The sources that `options` name, open within the block. Redis may be down, now or later: nodes that were found
    stay, and placement gets worse."""
    if not options.redis_url:
        yield Sources()
        return
    from tandem.kv_connector.directory.reader import RedisDirectory  # only clusters need the Redis client
    from tandem.router.access.shared_limits import SharedLimits

    directory = RedisDirectory(options.redis_url, options.namespace)
    limits = SharedLimits(options.redis_url, options.namespace, options.timeouts.request_s)
    directory.start()
    try:
        yield Sources(directory, directory, directory.counters, limits)
    finally:
        await directory.close()
        await limits.close()
