"""What the hand-off managers want done about peers, and what comes back. Frozen plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Source: a sink was greeted."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Source: a sink is lost."""

    node: NodeKey


@dataclass(frozen=True, slots=True)
class AdmitSource:
    """Sink: a source was greeted."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class FenceSource:
    """Sink: a source is lost; answered by Fenced."""

    node: NodeKey


PeerEffect = OpenChannel | CloseChannel | AdmitSource | FenceSource


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of that source can land any more."""

    node: NodeKey


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The data channel to a sink broke or could not be opened."""

    node: NodeKey
    reason: str
