"""Opens what a router learns nodes and cached prefixes from: Redis, when it is given one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tandem.engine.config import RouterOptions
from tandem.router.worker import Sources


@contextlib.asynccontextmanager
async def open_sources(options: RouterOptions) -> AsyncIterator[Sources]:
    yield Sources()
