"""What is kept of a pull, what is counted of all, and what is asked about layers on their way. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from tandem.engine.messages import PrefixHint, peer_id_of
from tandem.engine.request import Request
from tandem.kv_connector.meta import HandoffKey


class LayersUnderWay(Protocol):
    """worker.LayerLoad of a step. `arrived_at`: when all layers had come and were right, in seconds of the node's
    clock; 0: they have not."""

    @property
    def arrived_at(self) -> float: ...


class Gates(Protocol):
    """Of grants that are pulled by layers (kv_connector/layer_gates.py)."""

    def has_begun(self, grant_id: int) -> bool:
        """Whether the first layers have come and are right."""

    def load_of(self, grant_id: int) -> LayersUnderWay:
        """For a step that waits for the rest."""


class Stage(enum.Enum):
    WANTED = "wanted"
    ASKED = "asked"
    JOINED = "joined"  # the request has started: what was asked for comes under its first step
    HELD = "held"  # found by hash, held until the request starts
    OVER = "over"  # holds nothing


@dataclass(eq=False, slots=True)
class Pull:
    """`held`: one reference each, the request's hits and, once they came, the blocks after them."""

    request: Request
    hint: PrefixHint
    stage: Stage = Stage.WANTED
    key: HandoffKey = ("", 0)
    by_layer: bool = False
    first: int = 0  # number of hits
    hashes: list[bytes] = field(default_factory=list)  # from the prompt's first block on to the last that is asked for
    held: list[int] = field(default_factory=list)
    asked_at: float = 0.0
    deadline: float = 0.0
    resend_at: float = 0.0
    load: LayersUnderWay | None = None  # of the step under which it comes

    def seconds(self, now: float) -> float:
        """From the question to now, or until it had come: its commit may wait for the launch of the step that it is
        under."""
        arrived_at = 0.0 if self.load is None else self.load.arrived_at
        return (min(now, arrived_at) if arrived_at else now) - self.asked_at

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.hint.peer.node_id, self.hint.peer.epoch)

    @property
    def wanted(self) -> list[bytes]:
        return self.hashes[self.first :]


@dataclass
class PullCounters:
    asked: int = 0  # pulls
    joined: int = 0  # under a request's first step
    completed: int = 0
    failed: int = 0  # nothing came of them: the peer had nothing, was busy, slow, or is gone
    declined: int = 0  # computing was faster
    tokens: int = 0  # that need not be computed any more
    seconds: float = 0.0  # from the question until they had come, of completed ones
