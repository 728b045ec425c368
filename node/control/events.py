"""The events that a node's control plane gives to the step loop, and its counters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.contracts.errors import AdapterError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.process.process_log import RateLimited

if TYPE_CHECKING:
    from tandem.engine.adapters.host_adapter import HostAdapter

limited = RateLimited(logging.getLogger(__name__))


@dataclass(slots=True)
class Found:
    """An adapter in host memory, or why there is none."""

    adapter: HostAdapter | None = None
    problem: str = "this node takes no adapters: start it with --enable-lora"

    def look(self, where: Callable[[], HostAdapter]) -> None:
        try:
            self.adapter, self.problem = where(), ""
        except AdapterError as error:
            self.problem = error.message
        except Exception as error:  # it costs those who want this adapter alone
            limited.exception("an adapter can't be read", key="adapter")
            self.problem = f"the adapter can't be read: {error!r}"


NOTHING = Found()


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and the adapter that it names, if any."""

    sender: NodeKey
    message: Message
    adapter: Found | None = None


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer has said Hello or Welcome: messages may go to it."""

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
    """What went wrong with messages and connections since the node started."""

    undecodable: int = 0
    unknown_peer: int = 0
    refused: int = 0
    lost_peers: int = 0
    unroutable: int = 0
    failures: int = 0  # our faults over a peer's message: each cost a connection

    def as_dict(self) -> dict[str, float]:
        return {f"control_{name}": float(value) for name, value in vars(self).items()}
