"""Shows people who wait how far the loading of weights has come."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

LOG_EVERY_S = 10.0  # a guess
logger = logging.getLogger(__name__)


class LoadMeter:
    """A context manager that counts loaded tensors. `on_loaded` is told the fraction of tensors that are there, at most
    a hundred times. Without it a terminal gets a bar, and a log gets a line every `LOG_EVERY_S`."""

    def __init__(self, num_tensors: int, on_loaded: Callable[[float], None] | None) -> None:
        self._total, self._num, self._percent = num_tensors, 0, 0
        self._on_loaded = on_loaded
        self._next_line = time.monotonic() + LOG_EVERY_S
        is_drawn = on_loaded is None and sys.stderr.isatty()
        self._bar = tqdm(total=num_tensors, desc="loading weights", unit="tensor", disable=not is_drawn)

    def __enter__(self) -> LoadMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """Counts one more tensor as loaded."""
        self._num += 1
        self._bar.update()
        percent = 100 * self._num // self._total
        if self._on_loaded is not None and percent > self._percent:
            self._on_loaded(self._num / self._total)
        elif self._on_loaded is None and self._bar.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_EVERY_S
            logger.info("loading weights: %d of %d tensors", self._num, self._total)
        self._percent = percent
