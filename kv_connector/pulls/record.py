"""The record of one pull, and the counters over all. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tandem.engine.blocks.reservations import Hold
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.contracts.wire.parts import PrefixHint
from tandem.engine.scheduling.request import Request

NOT_ASKED = AttemptKey("", 0)


class PullStage(enum.Enum):
    """How far a pull has come."""

    WANTED = "wanted"
    ASKED = "asked"
    HELD = "held"  # found by hash, held until the request starts
    OVER = "over"  # holds nothing


@dataclass(eq=False, slots=True)
class Pull:
    """One request's pull. It has a reference to each block in `held`: the request's hits and, once they came, the
    blocks after them."""

    request: Request
    hint: PrefixHint
    stage: PullStage = PullStage.WANTED
    key: AttemptKey = NOT_ASKED
    first: int = 0  # number of hits
    hashes: list[bytes] = field(default_factory=list)  # from the prompt's first block to the last one asked for
    held: list[int] = field(default_factory=list)
    hold: Hold | None = None
    asked_at: float = 0.0
    deadline: float = 0.0
    resend_at: float = 0.0

    @property
    def wanted(self) -> list[bytes]:
        return self.hashes[self.first :]


@dataclass
class PullCounters:
    """What a node's pulls came to, since it started."""

    asked: int = 0  # pulls that were asked for
    completed: int = 0
    failed: int = 0  # pulls that brought nothing: the peer had nothing, was busy or slow, or is gone
    declined: int = 0  # pulls not made because computing was expected to be faster
    tokens: int = 0  # tokens that pulls have brought, so that they need not be computed
    times: dict[str, float] = field(default_factory=lambda: {"pull_seconds": 0.0})  # from question to arrival

    def came(self, seconds: float, num_tokens: int) -> None:
        self.completed += 1
        self.tokens += num_tokens
        note_duration(self.times, "pull_seconds", seconds)

    def as_dict(self) -> dict[str, float]:
        numbers = {name: value for name, value in vars(self).items() if name != "times"}
        return {**{f"pull_{name}": float(number) for name, number in numbers.items()}, **self.times}
