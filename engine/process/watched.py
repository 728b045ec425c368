"""Threads and tasks that nobody waits for, watched: none of them may end unseen while its process lives on half dead.

What an unexpected exception in one of them costs is said where it is started: by default the process, which its
supervisor starts again. A test reads off the source that nothing else starts threads or tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.engine.process.process_log import RateLimited

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)

EXIT_FAULT = 70  # EX_SOFTWARE: a fault of this program
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # guesses: pauses before work that failed starts again
GOOD_RUN_S = 30.0  # after which a failure counts as the first again; a guess

OnFailure = Callable[[BaseException], object]


def end_process(cause: BaseException | str) -> None:
    """Ends the process at once, without finally clauses, which may wait for what has failed. Others clean up as after a
    SIGKILL."""
    logger.critical("%s; this process ends, so that it can be started again", cause)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def end_with_any_thread() -> None:
    """Makes an exception that leaves any thread end the process, from here on: for one none of whose threads can be
    spared. Tests run several nodes in one process, so nodes' threads are watched here and not one by one."""
    threading.excepthook = _on_thread_exception


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = "?" if args.thread is None else args.thread.name
    logger.critical("thread %s failed", name, exc_info=args.exc_value)
    end_process(args.exc_value)


def log_only(error: BaseException) -> None:
    """Logs a failure, which costs nothing beyond the thread or task itself."""


def watched_thread(
    run: Callable[..., object], name: str, *args: Any, on_failure: OnFailure = end_process
) -> threading.Thread:
    """A daemon thread, not yet started. `on_failure` is called in it with the exception that left `run`."""

    def watched() -> None:
        try:
            run(*args)
        except Exception as error:
            logger.exception("thread %s failed", name)
            on_failure(error)

    return threading.Thread(target=watched, name=name, daemon=True)


def watched_task(work: Coroutine[Any, Any, Any], name: str, on_failure: OnFailure = end_process) -> asyncio.Task[None]:
    """Runs `work` on the running event loop. `on_failure` is called there with the exception that left it; being
    cancelled is no failure."""

    async def watched() -> None:
        try:
            await work
        except Exception as error:
            logger.exception("task %s failed", name)
            on_failure(error)

    return asyncio.get_running_loop().create_task(watched(), name=name)


def lasting_task(make: Callable[[], Coroutine[Any, Any, Any]], name: str) -> asyncio.Task[None]:
    """Runs `make()` until it is cancelled: when its coroutine fails, or ends, the next one follows after a pause."""

    async def last() -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                await make()
                repeated.error("task %s ended; it is started again", name)
            except Exception:
                repeated.exception("task %s failed; it is started again", name)
            if time.monotonic() - started > GOOD_RUN_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    return watched_task(last(), name)
