"""Sink's end of one link: the thread that serves it, from the first frame to the proof that nothing more lands."""

from __future__ import annotations

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec
import torch

from tandem.engine.errors import PeerLostError, TandemError
from tandem.kv_connector.transports.base import RegisteredPool
from tandem.kv_connector.transports.geometry import BlockGeometry, pool_stride_bytes
from tandem.kv_connector.transports.grants import GrantTable

logger = logging.getLogger(__name__)


class LinkReceiver(ABC):
    """`source` is (node_id, epoch) of the authenticated peer, `timeout_s` bounds each stall inside a frame, `on_end` is
    called once, when nothing of that source can change the pool any more."""

    def __init__(
        self,
        sock: socket.socket,
        source: tuple[str, int],
        pool: RegisteredPool,
        grants: GrantTable,
        timeout_s: float,
        on_end: Callable[[LinkReceiver], None],
    ) -> None:
        self.source = source
        self._sock = sock
        self._pool = pool
        self._grants = grants
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._geometry = BlockGeometry(pool.layout, pool_stride_bytes(pool.pool_NHLPBD))
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
        """Until the link ends. Returns only when nothing of that source can change the pool any more."""
        try:
            if self._pool.pool_NHLPBD.is_cuda:
                torch.cuda.set_device(self._pool.pool_NHLPBD.device)  # a thread's own setting
            self._serve_link()
        except PeerLostError:
            pass
        except (TandemError, msgspec.MsgspecError) as error:
            logger.warning("dropped the KV link of %s: %s", self.source[0], error)
        except Exception:
            logger.exception("KV link of %s failed", self.source[0])
        finally:
            self._end()

    def drop(self) -> None:
        """From any thread: the link breaks and `run` returns soon."""
        with self._lock:
            if self._ended:
                return
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster

    def abandon(self) -> None:
        """Instead of `run`, when the link is refused after all."""
        self._end()

    def _end(self) -> None:
        self._stop()
        with self._lock:
            self._ended = True
            self._sock.close()
        self._on_end(self)
