"""A trace of hand-offs for debugging: JSON lines with times, in one file for each node (`--handoff-trace FOLDER`).

A line has `t` (seconds of CLOCK_MONOTONIC, one clock for all processes of a host), `node`, `request`, `attempt`,
`stage`: "received Submit", "sent KVClaim" … for messages, "sent Tokens" once a request, "step" for what a step sends
(`num_deltas`), "slow step" with what took the time (engine/scheduling/turn_times.py), "ending" and "verifying" when the
transfer thread comes to a Finalize or Verify, "verified", and of a source's layers "computed" and "pushed" with
`layer`, `first_block`, of pushes `last_layer`, `begin` and `nbytes`. On CUDA those two are times of the device.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.codec import HandoffMessage
from tandem.engine.contracts.wire.parts import Message
from tandem.engine.contracts.wire.requests import Submit, Tokens

_KEPT_KEYS = 1 << 16  # a guess

_FLUSH_S = 0.1  # between flushes: a killed node loses so much of its trace; a guess


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on the host's clock, and on the device's where there is one."""

    host: float
    event: torch.cuda.Event | None = None

    @classmethod
    def now(cls, on_cuda: bool) -> Moment:
        """The present moment; on CUDA the one at which the current stream gets here."""
        event = torch.cuda.Event(enable_timing=True) if on_cuda else None
        if event is not None:
            event.record()
        return cls(time.monotonic(), event)

    def seconds(self, anchor: Moment) -> float:
        """This moment in seconds on the host's clock. `anchor` is a moment that has passed on both clocks."""
        if self.event is None or anchor.event is None:
            return self.host
        return anchor.host - self.event.elapsed_time(anchor.event) / 1e3


@dataclass(frozen=True, slots=True)
class _Push:
    layers: range  # -1: all
    first_block: int
    written: Sequence[Moment]  # each of them
    begun: Moment
    done: Moment
    nbytes: float


NO_REQUEST = AttemptKey("", 0)  # the key of events that belong to a step


class HandoffTrace:
    """Writes the trace. Any thread may call it, but notes on pushes belong to the transfer thread."""

    def __init__(self, folder: str, node_id: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / f"{node_id}.jsonl").open("a", encoding="utf-8")
        self._node_id = node_id
        self._lock = threading.Lock()
        self._flushed_at = 0.0
        self._pushes: dict[AttemptKey, list[_Push]] = defaultdict(list)
        self._answered: dict[AttemptKey, None] = {}

    def note(self, key: AttemptKey, stage: str, t: float | None = None, **values: Any) -> None:
        line = {
            "t": time.monotonic() if t is None else t,
            "node": self._node_id,
            "request": key.request_id,
            "attempt": key.attempt,
        }
        with self._lock:
            self._file.write(json.dumps({**line, "stage": stage, **values}) + "\n")
            if (now := time.monotonic()) - self._flushed_at > _FLUSH_S:
                self._flushed_at = now
                self._file.flush()

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def message(self, way: str, message: Message) -> None:
        """Notes a message that was "sent" or "received" (`way`). Of a request's tokens only the first ones are
        noted."""
        if isinstance(message, Tokens):
            self.note(NO_REQUEST, "step", num_deltas=len(message.deltas))
            for delta in message.deltas:
                key = delta.key
                if key not in self._answered:
                    self._answered[key] = None
                    self.note(key, f"{way} Tokens")
            while len(self._answered) > _KEPT_KEYS:
                del self._answered[next(iter(self._answered))]
        elif isinstance(message, Submit | HandoffMessage):
            self.note(message.key, f"{way} {type(message).__name__}")

    def pushed(
        self,
        key: AttemptKey,
        layers: range,
        first_block: int,
        written: Sequence[Moment],
        begun: Moment,
        done: Moment,
        nbytes: float,
    ) -> None:
        self._pushes[key].append(_Push(layers, first_block, written, begun, done, nbytes))

    def end_of_pushes(self, key: AttemptKey, on_cuda: bool) -> None:
        """Notes the times of a hand-off's pushes, which must all have run on the device. Costs one wait for a new
        stream's first event."""
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            anchor = Moment.now(on_cuda)
        if anchor.event is not None:
            anchor.event.synchronize()
            anchor = Moment(time.monotonic(), anchor.event)
        for push in self._pushes.pop(key, ()):
            for layer, moment in zip(push.layers, push.written, strict=False):
                self.note(key, "computed", moment.seconds(anchor), layer=layer, first_block=push.first_block)
            begin = max(moment.seconds(anchor) for moment in (push.begun, *push.written))
            values = {"layer": push.layers.start, "last_layer": push.layers.stop - 1, "first_block": push.first_block}
            self.note(key, "pushed", push.done.seconds(anchor), begin=begin, nbytes=push.nbytes, **values)
