"""The events that a node's control plane gives to the step loop, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef


@dataclass(frozen=True, slots=True)
class Received:
    sender: NodeKey
    message: Message


@dataclass(frozen=True, slots=True)
class PeerUp:
    info: NodeInfo


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer is lost. With `is_alive` it still runs, but has dropped the connection because this node was silent."""

    info: NodeInfo
    reason: str
    is_alive: bool = False


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A sink did not take our Hello, or answered as somebody else; hand-offs to `ref` can't happen."""

    ref: PeerRef
    reason: str


ControlEvent = Received | PeerUp | PeerLost | PeerRefused


@dataclass
class ControlCounters:
    undecodable: int = 0
    unknown_peer: int = 0
    refused: int = 0
    lost_peers: int = 0
    unroutable: int = 0
    failures: int = 0  # our faults over a peer's message: each cost a connection

    def as_dict(self) -> dict[str, float]:
        return {f"control_{name}": float(value) for name, value in vars(self).items()}
