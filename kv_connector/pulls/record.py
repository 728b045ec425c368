"""What is kept of a pull, and what is counted of all. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tandem.engine.blocks.reservations import Hold
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import PrefixHint
from tandem.engine.scheduling.request import Request

NOT_ASKED = AttemptKey("", 0)


class PullStage(enum.Enum):
    WANTED = "wanted"
    ASKED = "asked"
    HELD = "held"  # found by hash, held until the request starts
    OVER = "over"  # holds nothing


@dataclass(eq=False, slots=True)
class Pull:
    """`held`: one reference each, the request's hits and, once they came, the blocks after them."""

    request: Request
    hint: PrefixHint
    stage: PullStage = PullStage.WANTED
    key: AttemptKey = NOT_ASKED
    first: int = 0  # number of hits
    hashes: list[bytes] = field(default_factory=list)  # from the prompt's first block on to the last that is asked for
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
    asked: int = 0  # pulls
    completed: int = 0
    failed: int = 0  # nothing came of them: the peer had nothing, was busy, slow, or is gone
    declined: int = 0  # computing was faster
    tokens: int = 0  # that need not be computed any more
    seconds: float = 0.0  # from the question until they had come, of completed ones
