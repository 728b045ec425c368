"""What a node did for its newest requests, in memory, for whoever asks how one of them came about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.codec import HandoffMessage
from tandem.engine.contracts.wire.operate import MAX_TOLD, NodeMoment, Story, TellStory
from tandem.engine.contracts.wire.parts import Message
from tandem.engine.contracts.wire.requests import Submit

KEPT_REQUESTS, KEPT_MOMENTS = 512, 128  # guesses: some megabytes at most
JOINED_S = 0.002  # layers whose pushes follow each other so soon are one moment; a guess


@dataclass(slots=True)
class _NotedMoment:
    attempt: int
    stage: str
    ended_at: float
    lasts_s: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    layers: range = range(0)


class Stories:
    """The newest requests that came by Submit, each with its first moments. Any thread may call it. Times of pushes are
    the transfer thread's: on a GPU it only launches them, so that they end a little later than is told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._moments: dict[str, list[_NotedMoment]] = {}  # by sub-request, the oldest first

    def message(self, way: str, message: Message) -> None:
        """Notes a message that was "sent" or "received" (`way`)."""
        if not isinstance(message, Submit | HandoffMessage):
            return
        with self._lock:
            if isinstance(message, Submit) and message.request_id not in self._moments:
                self._moments[message.request_id] = []
                if len(self._moments) > KEPT_REQUESTS:
                    del self._moments[next(iter(self._moments))]
            self._add(
                message.request_id, _NotedMoment(message.attempt, f"{way} {type(message).__name__}", self._clock())
            )

    def chunks(self, rows: Sequence[tuple[AttemptKey, int]], seconds: float) -> None:
        """Notes the parts of prompts, with their tokens, in a step that has just ended and took `seconds`."""
        now = self._clock()
        with self._lock:
            for key, num_tokens in rows:
                self._add(key.request_id, _NotedMoment(key.attempt, "chunk", now, seconds, num_tokens))

    def pushed(self, key: AttemptKey, layers: range | None, num_bytes: int, seconds: float) -> None:
        """Notes a push of `layers` (None: all) that has just ended."""
        now = self._clock()
        with self._lock:
            last = next(iter(self._moments.get(key.request_id, ())[-1:]), None)
            follows = last is not None and last.stage == "pushed" and now - seconds - last.ended_at < JOINED_S
            if last is not None and follows and layers is not None and last.layers.stop == layers.start:
                last.lasts_s, last.ended_at = last.lasts_s + now - last.ended_at, now
                last.num_bytes, last.layers = last.num_bytes + num_bytes, range(last.layers.start, layers.stop)
            else:
                moment = _NotedMoment(key.attempt, "pushed", now, seconds, 0, num_bytes, layers or range(0))
                self._add(key.request_id, moment)

    def tell(self, asked: TellStory) -> Story:
        now = self._clock()
        with self._lock:
            told = [
                NodeMoment(
                    name,
                    moment.attempt,
                    moment.stage,
                    max(0.0, now - moment.ended_at),
                    max(0.0, moment.lasts_s),
                    moment.num_tokens,
                    moment.num_bytes,
                    moment.layers.start if moment.layers else -1,
                    moment.layers.stop - 1,
                )
                for name in dict.fromkeys(asked.request_ids)
                for moment in self._moments.get(name, ())
            ]
        told.sort(key=lambda moment: -moment.ago_s)
        return Story(ask=asked.ask, moments=tuple(told[:MAX_TOLD]))

    def _add(self, request_id: str, moment: _NotedMoment) -> None:
        moments = self._moments.get(request_id)
        if moments is not None and len(moments) < KEPT_MOMENTS:
            moments.append(moment)
