"""A thread that runs jobs of the tiers in the order in which they were submitted, and says how each ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.tiers.jobs import JobDone, TierJob

limited = RateLimited(logging.getLogger(__name__))
Work = Callable[[], Iterable[bytes] | None]
STOP_S = 2.0  # a guess: what is being copied may end first


class JobThread:
    """A thread for jobs. `post` is called from it with each result and must not block; `begin` is called there
    first."""

    def __init__(self, name: str, post: Callable[[JobDone], None], begin: Callable[[], object] = lambda: None) -> None:
        self._post, self._begin = post, begin
        self._queue: queue.SimpleQueue[tuple[TierJob, Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: TierJob, work: Work) -> None:
        """Queues a job. `work` does it and returns the hashes of blocks that could not be copied; if it raises, these
        are all."""
        self._queue.put((job, work))

    def stop(self) -> bool:
        """Finishes what was submitted, waiting at most STOP_S. Returns whether the thread has ended."""
        self._queue.put(None)
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begin()
        while (item := self._queue.get()) is not None:
            job, work = item
            began = time.monotonic()
            try:
                bad = tuple(work() or ())
            except Exception:  # only the copy fails, not the node: whoever asked computes instead
                limited.exception("%s of %d blocks failed", type(job).__name__, len(job.hashes))
                bad = job.hashes
            self._post(JobDone(job, time.monotonic() - began, bad))
