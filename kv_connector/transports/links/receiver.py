"""The sink's end of one link: a thread serves it from the first frame to the proof that nothing more lands."""

from __future__ import annotations

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.contracts.errors import PeerLostError, TandemError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.layouts.geometry import BlockGeometry, pool_stride_bytes
from tandem.kv_connector.transports.base import RegisteredPool
from tandem.kv_connector.transports.grants import GrantTable
from tandem.kv_connector.transports.links.landing_wire import LandFrame
from tandem.kv_connector.transports.links.tcp_wire import WriteFrame

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuthenticatedSocket:
    """A connection for a receiver to serve. `source` is the authenticated peer, `timeout_s` bounds each stall inside a
    frame, `on_end` is called once, when nothing of that source can change the pool any more."""

    sock: socket.socket
    source: NodeKey
    pool: RegisteredPool
    grants: GrantTable
    timeout_s: float
    on_end: Callable[[LinkReceiver], None]


class LinkReceiver(ABC):
    """One source's link at the sink. `run` is its thread."""

    def __init__(self, link: AuthenticatedSocket) -> None:
        self.source = link.source
        self._sock = link.sock
        self._pool = link.pool
        self._grants = link.grants
        self._timeout_s = link.timeout_s
        self._on_end = link.on_end
        self._geometry = BlockGeometry(link.pool.layout, pool_stride_bytes(link.pool.pool_NHLPBD))
        self._lock = threading.Lock()
        self._ended = False

    @abstractmethod
    def _serve_link(self) -> None:
        """Serves frames until it raises: PeerLostError at the link's end, another TandemError for a bad peer."""

    @abstractmethod
    def _stop(self) -> None:
        """Frees what serving held. Returns when this source can reach no memory of this node any more."""

    def has_direct_writes(self, grant_id: int) -> bool:
        """Whether the source began to write past this receiver under that grant, and has not flushed since."""
        return False

    def run(self) -> None:
        """Serves until the link ends. Returns only when nothing of that source can change the pool any more."""
        try:
            if self._pool.pool_NHLPBD.is_cuda:
                torch.cuda.set_device(self._pool.pool_NHLPBD.device)  # each thread has a setting of its own
            self._serve_link()
        except PeerLostError:
            pass
        except TandemError as error:
            logger.warning("dropped the KV link of %s: %s", self.source.node_id, error)
        except Exception:
            logger.exception("KV link of %s failed", self.source.node_id)
        finally:
            self._end()

    def drop(self) -> None:
        """Breaks the link, from any thread; `run` returns soon."""
        with self._lock:
            if self._ended:
                return
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster

    def abandon(self) -> None:
        """Ends the link without serving it. Is called in place of `run` when the link is refused after all."""
        self._end()

    def _check_blocks(self, frame: WriteFrame | LandFrame) -> None:
        """Raises TransportError, which ends the link, for a frame that makes no sense."""
        geometry = self._geometry
        if not (frame.first_layer >= 0 and 0 < frame.num_layers <= geometry.num_layers - frame.first_layer):
            raise TransportError(f"layers {frame.first_layer}+{frame.num_layers} of {geometry.num_layers}")
        if len(frame.block_ids) != len(frame.num_valid):
            raise TransportError("block_ids and num_valid differ in length")
        if not all(0 < valid <= geometry.block_size for valid in frame.num_valid):
            raise TransportError(f"num_valid {frame.num_valid} in blocks of {geometry.block_size} slots")

    def _payload_bytes(self, frame: WriteFrame | LandFrame) -> int:
        return sum(self._geometry.payload_bytes(frame.num_layers, valid) for valid in frame.num_valid)

    def _end(self) -> None:
        self._stop()
        with self._lock:
            self._ended = True
            self._sock.close()
        self._on_end(self)
