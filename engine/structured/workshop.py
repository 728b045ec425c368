"""A thread that compiles grammars, so that the step loop never waits for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tandem.engine.process.watched import watched_thread
from tandem.engine.structured.grammars import Grammars


class GrammarWorkshop:
    """Compiles grammars in the order in which they come, one after the other. `prepare` must always be called from one
    and the same thread."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_given = self._num_done = 0  # each written by one thread

    def prepare(self, grammar: str, then: Callable[[], object]) -> None:
        """Calls `then` when the grammar has been compiled, or can't be: at once if it is known and nobody waits. The
        empty grammar needs no compiling and only takes its turn."""
        if self._num_given == self._num_done and (not grammar or grammar in self._grammars):
            then()
            return
        if self._thread is None:
            self._thread = watched_thread(self._run, "tandem-grammars")
            self._thread.start()
        self._num_given += 1
        self._waiting.put((grammar, then))

    def stop(self) -> None:
        """Ends the thread when what it has begun is done."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            grammar, then = work
            try:
                if grammar:
                    self._grammars.matcher(grammar)
            except ValueError:
                pass  # the guide that follows this grammar reports the error
            then()
            self._num_done += 1
