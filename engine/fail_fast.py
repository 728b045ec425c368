"""A process none of whose threads may end unnoticed: one that lives on without it would be half dead."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)


def end_with_any_thread() -> None:
    """From here on an exception that leaves a thread ends this process, with exit code 1. Whoever supervises it starts
    it again, and its peers see it gone at once instead of silent."""
    threading.excepthook = _on_exception


def _on_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = "?" if args.thread is None else args.thread.name
    cause = None if args.exc_value is None else (args.exc_type, args.exc_value, args.exc_traceback)
    logger.critical("thread %s failed: %r", name, args.exc_value, exc_info=cause)
    end_process("none of its threads can be spared")


def end_process(reason: str) -> None:
    """At once, with exit code 1: other threads may wait for what will never come."""
    logger.critical("%s; this process ends", reason)
    logging.shutdown()
    os._exit(1)
