"""The base of transports whose bytes travel beside the link, by a library that may be missing. A subclass names its
channel and receiver classes."""

from __future__ import annotations

import socket
from abc import abstractmethod
from typing import ClassVar

import torch

from tandem.engine.contracts.errors import DecodeError, TransportError
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import OnLost
from tandem.kv_connector.transports.links.landing_channel import LandingChannel
from tandem.kv_connector.transports.links.transport import LinkTransport


class LandingTransport(LinkTransport):
    """A transport by a library: usable where the library is, with a link for each source and sink."""

    channel: ClassVar[type[LandingChannel]]  # the source's end of a link

    @abstractmethod
    def _problem(self) -> str:
        """ "" when the library can be used here, else what to do."""

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        problem = self._problem()
        return not problem, problem

    def _make_channel(self, sock: socket.socket, peer: NodeInfo, on_lost: OnLost) -> LandingChannel:
        assert self.pool is not None, "register the pool first"
        try:
            return self.channel(self.pool, sock, peer, on_lost, self._timeout_s)
        except DecodeError as error:
            raise TransportError(f"{peer.node_id} sent no offer that {self.name} understands: {error}") from error
