"""A line that several worker processes of a router would write in the same moment is written by one of them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from tandem.engine.process.process_log import REPEAT_S

HOLD_S = REPEAT_S  # so that of trouble that lasts one process tells, as often as it would alone
NUM_PLACES = 64  # lines that are known at a time; a guess


class SaidByOne(logging.Filter):
    """A filter of a worker's log. Whoever says a line first leaves a link in a folder that all workers share, which is
    made whole or not at all, so that nobody waits for anybody. What a process repeats itself passes, and so do lines
    about one request; a folder that can't be used costs nothing but the doubles."""

    def __init__(self, folder: Path, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`index`: which of the workers this is. `clock`: the host's, the same for all."""
        super().__init__()
        self._folder, self._index, self._clock = folder, str(index), clock

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "fields") or hasattr(record, "about"):
            return True
        text, now = crc32(record.getMessage().encode()), self._clock()
        path = self._folder / f"said-{text % NUM_PLACES}"
        with contextlib.suppress(OSError, ValueError):
            for _ in range(2):
                try:
                    path.symlink_to(f"{self._index} {text} {now}")
                    return True
                except FileExistsError:
                    by, known, at = os.readlink(path).split()
                if known == str(text) and now - float(at) < HOLD_S:
                    return by == self._index
                path.unlink(missing_ok=True)
        return True
