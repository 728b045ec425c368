"""The decisions of a hand-off manager, as a list of effects. Frozen plain data.

Order is the contract: effects are carried out in the order of the list (`node/carry_out.py`). A grant is opened before
its message is sent; one that ended is closed before another has its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol.jobs import TransferJob, TransportCommand
from tandem.kv_connector.protocol.outcomes import SinkOutcome, SourceOutcome
from tandem.kv_connector.protocol.peer_effects import PeerEffect


@dataclass(frozen=True, slots=True)
class Send:
    """A hand-off message to another node."""

    to: NodeKey
    message: Message


Effect = Send | PeerEffect | TransportCommand | TransferJob
SourceEffect = Effect | SourceOutcome
SinkEffect = Effect | SinkOutcome
