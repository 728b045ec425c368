"""Effects of the hand-off managers that concern peers, and the events that answer them. Frozen plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Source: open a data channel to a sink that was greeted."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Source: close the data channel to a sink that is lost."""

    node: NodeKey


@dataclass(frozen=True, slots=True)
class AdmitSource:
    """Sink: let a source that was greeted write under the grants that it will get."""

    peer: NodeInfo


@dataclass(frozen=True, slots=True)
class FenceSource:
    """Sink: make sure that a source that is lost writes no more. Answered by Fenced."""

    node: NodeKey


PeerEffect = OpenChannel | CloseChannel | AdmitSource | FenceSource


@dataclass(frozen=True, slots=True)
class Fenced:
    """Answer to FenceSource: no write of that source can land any more."""

    node: NodeKey


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The data channel to a sink broke or could not be opened."""

    node: NodeKey
    reason: str
