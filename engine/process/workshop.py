"""A thread for what takes long, so that those who need its result don't do it themselves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tandem.engine.process.watched import watched_thread


class Workshop:
    """Does one work after the other, in the order in which they come, from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Callable[[], object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._num_given = self._num_done = 0

    def prepare(self, work: Callable[[], object] | None, then: Callable[[], object]) -> None:
        """Calls `then` when `work` is done. Without `work` it is called when what was given before is done: at once if
        that is so already."""
        with self._lock:
            is_due = work is None and self._num_given == self._num_done
            if not is_due:
                if self._thread is None:
                    self._thread = watched_thread(self._run, self._name)
                    self._thread.start()
                self._num_given += 1
                self._waiting.put((work or _nothing, then))
        if is_due:
            then()

    def stop(self) -> None:
        """Ends the thread when what it has begun is done."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (todo := self._waiting.get()) is not None:
            work, then = todo
            work()
            then()
            with self._lock:
                self._num_done += 1


def _nothing() -> None:
    pass
