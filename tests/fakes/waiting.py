"""The waits of tests. Their deadlines end what hangs and decide nothing else: whoever is green has long gone on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

# What takes a second on an idle machine may take many on a loaded one. A guess; pytest's own limit is a multiple of it.
PATIENCE_S = 120.0
LOOK_EVERY_S = 0.005


def happens(condition: Callable[[], object], within_s: float = PATIENCE_S) -> bool:
    """Whether `condition` comes to hold."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def wait_until(condition: Callable[[], object], what: str = "it", within_s: float = PATIENCE_S) -> None:
    assert happens(condition, within_s), f"waited {within_s:g} s for {what}"


async def soon(condition: Callable[[], object], what: str = "it", within_s: float = PATIENCE_S) -> None:
    """`wait_until` in an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        await asyncio.sleep(LOOK_EVERY_S)


def is_gone(pid: int) -> bool:
    """Whether that process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: is_gone(pid), f"the end of process {pid}")
