"""The source's end of a link whose bytes travel beside it: packs short runs into slots, keeps count of the answers.

All of `write` and `flush` runs under one lock, and every wait checks whether the channel has ended, so that `close`
from another thread takes the library's agent down only when nobody uses it.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from tandem.engine.contracts.errors import PeerLostError, TandemError, TransportError
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.block_slots import NUM_SLOTS, BlockSlots
from tandem.kv_connector.layouts.geometry import BlockGeometry, pool_stride_bytes
from tandem.kv_connector.transports.base import OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.links.landing_wire import (
    LandFrame,
    LandingFlushFrame,
    OpenFrame,
    Refusal,
    WakeFrame,
    decode_answer,
)
from tandem.kv_connector.transports.links.tcp_wire import receive_header, send_frame
from tandem.kv_connector.transports.pool_channel import PoolChannel

POLL_PAUSE_S = 20e-6  # a guess
LIBRARY_START_S = 5.0  # a process's first agent loads plugins and looks at every network device; a guess
OfferT = TypeVar("OfferT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A frame that has no answer yet. Its `slot` (-1: none) is free again when the answer comes."""

    grant_id: int
    slot: int


class LandingChannel(PoolChannel):
    """A channel over such a link; subclasses move the bytes. Any failure but a refused grant ends the channel."""

    def __init__(
        self, source: RegisteredPool, sock: socket.socket, peer: NodeInfo, on_lost: OnLost, timeout_s: float
    ) -> None:
        super().__init__(source, peer.key, on_lost)
        self._sock = sock
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        assert peer.layout is not None, "only nodes are connected to"
        self._geometry = BlockGeometry(peer.layout, pool_stride_bytes(source.pool_NHLPBD))
        self._slots = BlockSlots(self._geometry, source.pool_NHLPBD.device)
        self._free_slots = list(range(NUM_SLOTS))
        self._sequence = 0
        self._asked: dict[int, _Asked] = {}  # by sequence
        self._refused: dict[int, str] = {}  # by grant id, until flushed
        self._awake = False  # whether the sink drives its library
        self._progressed_at = 0.0

    # --- what the library does ------------------------------------------------------------------------------

    @abstractmethod
    def _send_slot(self, frame: LandFrame) -> None:
        """Starts to move a packed slot to the sink's; `_ask(frame)` tells the sink, before or after."""

    @abstractmethod
    def _poll_library(self) -> bool:
        """Drives the library. Returns whether something that was started has ended; raises what the library raises."""

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether nothing that was started is under way."""

    @abstractmethod
    def _stop(self) -> None:
        """Takes the library's side down. When it returns, no memory of this node is read any more."""

    # --- Channel --------------------------------------------------------------------------------------------

    def flush(self, grant: KVGrant) -> None:
        with self._guarded():
            self._wait(self._is_idle)
            self._awake = False
            sequence = self._ask(LandingFlushFrame(0, grant.grant_id))
            self._wait(lambda: sequence not in self._asked)
            reason = self._refused.pop(grant.grant_id, "")
        if reason:
            raise TransportError(f"{self.peer.node_id} refused: {reason}", request_id=grant.request_id)

    def _release(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # so that the sink hears of it at once, whatever we wait for
        except OSError:
            pass
        with self._lock:
            self._stop()
            self._sock.close()

    def _receive_offer(self, kind: type[OfferT]) -> OfferT:
        """Receives the sink's offer. Raises TransportError when the sink refuses, PeerLostError when it is gone,
        DecodeError when it sends anything else."""
        self._sock.settimeout(max(self._timeout_s, LIBRARY_START_S))
        decode_offer: WireDecoder[OfferT | Refusal] = WireDecoder(kind | Refusal)  # type: ignore[operator]
        offer = decode_offer(receive_header(self._sock))
        self._sock.settimeout(self._timeout_s)
        if isinstance(offer, Refusal):
            raise TransportError(f"{self.peer.node_id}: {offer.error}")
        return offer

    # --- inside, under the lock -----------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Holds the lock; an error of library or link inside ends the channel and is raised as TransportError or
        PeerLostError."""
        with self._lock:
            try:
                self._raise_if_ended()
                yield
            except AssertionError:
                raise
            except Exception as error:
                if isinstance(error, TransportError) and error.request_id:
                    raise  # only one grant was refused: others go on
                self._raise_if_ended()
                reason = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
                self.lose(reason)
                if isinstance(error, TransportError):
                    raise
                raise PeerLostError(f"{self.peer.node_id} can't be written to: {reason}") from error

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            send_frame(self._sock, WakeFrame())
        self._progressed_at = time.monotonic()

    def _ask(self, frame: OpenFrame | LandFrame | LandingFlushFrame) -> int:
        """Numbers and sends a frame that will be answered; returns its sequence number."""
        self._sequence += 1
        self._asked[self._sequence] = _Asked(frame.grant_id, frame.slot if isinstance(frame, LandFrame) else -1)
        send_frame(self._sock, msgspec.structs.replace(frame, sequence=self._sequence))
        return self._sequence

    def _write_staged(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        layers = write.span(self._geometry.num_layers)
        for first, end, nbytes in self._slots.groups(len(layers), write.num_valid):
            sources, destinations = zip(*write.pairs[first:end], strict=True)
            valid = tuple(write.num_valid[first:end])
            self._wait(lambda: bool(self._free_slots))
            slot = self._free_slots.pop()
            self._slots.pack(slot, pool_NHLPBD, sources, layers, valid)
            self._wait_for_device()
            where = destinations, layers.start, len(layers), valid, slot, nbytes
            self._send_slot(LandFrame(0, write.grant.grant_id, *where))

    def _wait_for_device(self) -> None:
        """Waits for the current stream: the library reads memory without asking the stream that fills it."""
        if self.source.pool_NHLPBD.is_cuda:
            torch.cuda.current_stream(self.source.pool_NHLPBD.device).synchronize()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Drives everything until `is_done`. Raises PeerLostError, or TransportError when nothing moves in time."""
        self._progressed_at = time.monotonic()
        while not is_done():
            self._raise_if_ended()
            if self._poll_library() or self._take_answer():
                self._progressed_at = time.monotonic()
            elif time.monotonic() - self._progressed_at > self._timeout_s:
                raise TransportError("no progress in time: the peer is stopped, overloaded or unreachable")
            elif not is_done():
                time.sleep(POLL_PAUSE_S)

    def _take_answer(self) -> bool:
        if not self._readable.poll(0):
            return False
        answer = decode_answer(receive_header(self._sock))
        asked = self._asked.pop(answer.sequence, None)
        if asked is None:
            raise TransportError(f"an answer to frame {answer.sequence}, which was not asked")
        if asked.slot >= 0:
            self._free_slots.append(asked.slot)
        if answer.error:
            self._refused[asked.grant_id] = answer.error
        return True
