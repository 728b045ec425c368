"""The logic of a pooling node: which requests wait, which are computed together, which end. Sans-IO."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.operate import Drain
from tandem.engine.contracts.wire.parts import Message
from tandem.engine.contracts.wire.requests import Cancel, Submit
from tandem.engine.pooling.input import PoolingInput
from tandem.engine.process.process_log import RateLimited
from tandem.engine.scheduling.request import PooledEvent
from tandem.node.control.events import ControlEvent, PeerLost, Received
from tandem.node.requests import AcceptedRequest, RequestBook

limited = RateLimited(logging.getLogger(__name__))

Run = Callable[[Sequence[PoolingInput]], npt.NDArray[np.float32]]


@dataclass
class PoolingNode:
    """A node's queue of whole requests. `run` computes a batch: at most `max_num_seqs` inputs, padded to at most
    `max_num_batched_tokens` tokens but for a single one that is longer."""

    key: NodeKey
    book: RequestBook
    run: Run
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    draining: bool = False
    is_ending: bool = False
    num_batches: int = 0
    _waiting: dict[AttemptKey, AcceptedRequest] = field(default_factory=dict)

    def on_control(self, event: ControlEvent, now: float) -> None:
        if isinstance(event, PeerLost):
            for entry in self.book.router_lost(event.info.key):
                self._waiting.pop(entry.request.key, None)
        elif isinstance(event, Received) and isinstance(event.message, Submit):
            self._submit(event.sender, event.message, now)
        elif isinstance(event, Received) and isinstance(event.message, Cancel):
            self._cancel(event.sender, event.message.key)
        elif isinstance(event, Received) and isinstance(event.message, Drain):
            self.draining = event.message.on or self.is_ending

    def _submit(self, router: NodeKey, submit: Submit, now: float) -> None:
        if submit.key not in self.book.entries:
            if self.draining:
                self.book.refuse(router, submit, "draining", "the node is draining", retryable=True)
                return
            if len(self._waiting) >= self.max_queue:
                self.book.refuse(router, submit, "overloaded", "the node's queue is full", retryable=True)
                return
        entry = self.book.open(router, submit, now)
        if entry is None:
            return
        for older in self.book.older_attempts(entry):
            self._cancel(older.router, older.request.key)
        self.book.accept(entry)
        self._waiting[submit.key] = entry

    def _cancel(self, router: NodeKey, key: AttemptKey) -> None:
        _, ended = self.book.cancel_samples(router, key, ())
        if ended:
            self._waiting.pop(key, None)

    def on_tick(self, now: float) -> None:
        for entry in self.book.expired(now):
            self._waiting.pop(entry.request.key, None)

    def step(self) -> bool:
        """Computes a batch of the waiting requests; False if none waits."""
        batch = self._next_batch()
        if not batch:
            return False
        for entry in batch:
            del self._waiting[entry.request.key]
        inputs = [PoolingInput(entry.request.prompt.token_ids, entry.submit.pair_start) for entry in batch]
        try:
            values = self.run(inputs)
        except Exception:  # of whatever kind: it costs these requests
            limited.exception("a batch of %d inputs failed", len(batch))
            for entry in batch:
                self.book.fail(entry.request.key, "internal_error", "the node can't compute this", retryable=True)
            return True
        self.num_batches += 1
        events = zip(batch, values, strict=True)
        self.book.on_events([PooledEvent(entry.request, row.astype("<f4").tobytes()) for entry, row in events])
        return True

    def _next_batch(self) -> list[AcceptedRequest]:
        """The next batch: the first requests by priority and arrival, as many as fit."""
        order = sorted(self._waiting.values(), key=lambda entry: (entry.submit.priority, entry.request.prompt.arrival))
        batch: list[AcceptedRequest] = []
        width = 0
        for entry in order[: self.max_num_seqs]:
            width = max(width, len(entry.request.prompt.token_ids))
            if batch and width * (len(batch) + 1) > self.max_num_batched_tokens:
                break
            batch.append(entry)
        return batch

    def drain(self) -> None:
        """Takes nothing new from here on: the node ends when it is empty."""
        self.draining = self.is_ending = True

    @property
    def is_empty(self) -> bool:
        return not self.book.entries

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        return self.book.drain_outbox()

    def status(self) -> Status:
        counters = {
            "requests_accepted": float(self.book.num_accepted),
            "requests_ended": float(self.book.num_ended),
            "batches": float(self.num_batches),
        }
        num_waiting_tokens = sum(len(entry.request.prompt.token_ids) for entry in self._waiting.values())
        return Status(
            node_id=self.key.node_id,
            epoch=self.key.epoch,
            num_waiting=len(self._waiting),
            num_waiting_tokens=num_waiting_tokens,
            draining=self.draining,
            counters=counters,
        )

    def check_integrity(self) -> None:
        self.book.check_integrity()
        assert self._waiting.keys() == self.book.entries.keys(), "who lives waits, between two batches"
