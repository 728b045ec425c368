"""The transfer thread's notes on grants. A grant ends when its Retire is submitted, not when that is reached."""

from __future__ import annotations

import threading
from collections import OrderedDict

_MAX_ENDED_GRANTS = 1 << 14  # pushes of steps launched before a Retire arrive within a few steps of it; a guess


class GrantBook:
    """The grants that have ended (Retire submitted), that have failed, and that were written since their last flush."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self.failed: set[int] = set()  # these two belong to the transfer thread
        self.unflushed: set[int] = set()

    def end(self, grant_id: int) -> None:
        """Ends a grant; may be called from any thread."""
        with self._lock:
            self._ended[grant_id] = None
            while len(self._ended) > _MAX_ENDED_GRANTS:
                self._ended.popitem(last=False)

    def is_over(self, grant_id: int) -> bool:
        return grant_id in self._ended or grant_id in self.failed

    def forget(self, grant_id: int) -> None:
        self.failed.discard(grant_id)
        self.unflushed.discard(grant_id)
