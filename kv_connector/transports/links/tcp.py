"""Transport over plain sockets: works between any two machines, for CPU and CUDA pools. The sink does the writing.

The source has a `TcpChannel`, whose blocking sends have deadlines; the sink has a `TcpReceiver` thread for each link.
"""

from __future__ import annotations

import socket

import torch

from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import OnLost
from tandem.kv_connector.transports.links.tcp_channel import TcpChannel
from tandem.kv_connector.transports.links.tcp_receiver import TcpReceiver
from tandem.kv_connector.transports.links.transport import LinkTransport


class TcpTransport(LinkTransport):
    """KV over TCP sockets, usable everywhere."""

    name = "tcp"
    receiver_writes = True
    receiver = TcpReceiver

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        return True, ""

    def _make_channel(self, sock: socket.socket, peer: NodeInfo, on_lost: OnLost) -> TcpChannel:
        assert self.pool is not None, "register the pool first"
        return TcpChannel(self.pool, sock, peer, on_lost)
