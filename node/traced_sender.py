"""A node's control plane for its loop, with each message noted in the trace of hand-offs."""

from __future__ import annotations

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import Message, PeerRef
from tandem.kv_connector.transfer.trace import HandoffTrace
from tandem.node.control.plane import ControlPlane


class TracedSender:
    """What a node's loop needs of its control plane, with each message noted."""

    def __init__(self, control: ControlPlane, trace: HandoffTrace) -> None:
        self._control, self._trace = control, trace

    @property
    def status(self) -> Status | None:
        return self._control.status

    @status.setter
    def status(self, status: Status | None) -> None:
        self._control.status = status

    def send(self, peer_id: str, message: Message) -> None:
        self._trace.message("sent", message)
        self._control.send(peer_id, message)

    def connect(self, ref: PeerRef) -> None:
        self._control.connect(ref)
