"""What holds for every test: none fails because the machine is busy."""

from __future__ import annotations

import gc
import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# What is imported and collected stays, and the garbage collector would look through it again and again: most of the
# time that a collection takes.
gc.disable()


def pytest_collection_finish() -> None:
    """Has the garbage collector leave out what lives on: six thousand tests, torch and transformers."""
    gc.freeze()
    gc.enable()
