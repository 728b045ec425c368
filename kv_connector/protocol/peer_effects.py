"""What the hand-off managers want done about peers, and what comes back. Frozen plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.wire.parts import NodeInfo


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Source: a sink was greeted."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Source: a sink is lost."""

    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AdmitSource:
    """Sink: a source was greeted."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class FenceSource:
    """Sink: a source is lost; answered by Fenced."""

    node_id: str
    epoch: int


PeerEffect = OpenChannel | CloseChannel | AdmitSource | FenceSource


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of that source can land any more."""

    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The data channel to a sink broke or could not be opened."""

    node_id: str
    epoch: int
    reason: str
