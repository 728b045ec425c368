"""Reports, for the log, what a process did while one of its threads stood still.

A thread that holds the interpreter inside of a long call gives it up right behind that: others have been asking for
it. Where they see it then is where it was.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

INNERMOST = 3  # frames of each thread; a guess


class TurnClock:
    """Measures the turns of a thread that is never idle for long, and is called by that thread alone."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._turned_at, self._cpu_s = time.monotonic(), time.process_time()

    def turned(self, now: float) -> str:
        """Notes the end of a turn. Returns why it took so long, if it did, else ""."""
        seconds, self._turned_at = now - self._turned_at, now
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        if seconds < self._longest_s:
            return ""
        used = f"{self._cpu_s - cpu_s:.1f} s of CPU time in this process"
        return f"{threading.current_thread().name} stood still for {seconds:.1f} s ({used}); threads: {_whereabouts()}"


def _whereabouts() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = {names.get(ident, "?"): frame for ident, frame in sys._current_frames().items() if ident != own}
    return "; ".join(f"{name} in {' < '.join(_innermost(frame))}" for name, frame in frames.items())


def _innermost(frame: FrameType | None) -> Iterator[str]:
    for _ in range(INNERMOST):
        if frame is not None:
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
