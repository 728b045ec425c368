"""What a node's control plane tells the step loop, and what it counts."""

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
    """`is_alive`: it is there, and has dropped the connection because this node was silent."""

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
    failures: int = 0  # of ours, with what a peer sent: each cost a connection

    def as_dict(self) -> dict[str, float]:
        return {f"control_{name}": float(value) for name, value in vars(self).items()}
