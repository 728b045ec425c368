"""The sink's end of a link whose bytes travel beside it: a thread that stores landed bytes and drives the library.

What reaches the pool by this thread (LandFrame) passes the gate of grants, as with tcp. What the source writes into
the pool itself (after an OpenFrame) can't be turned away any more: only the end of this thread, which takes down the
library's agent and with it every way into the pool, proves that nothing more lands.
"""

from __future__ import annotations

import select
import time
from abc import abstractmethod

import msgspec

from tandem.engine.contracts.errors import GrantError, TransportError
from tandem.kv_connector.layouts.block_slots import NUM_SLOTS, BlockSlots
from tandem.kv_connector.transports.links.landing_wire import (
    Answer,
    Frame,
    LandFrame,
    LandingFlushFrame,
    OpenFrame,
    Refusal,
    WakeFrame,
    decode_frame,
)
from tandem.kv_connector.transports.links.receiver import AuthenticatedSocket, LinkReceiver
from tandem.kv_connector.transports.links.tcp_wire import receive_header, send_frame

_SHORTEST_PAUSE_S = 200e-6  # sockets buffer many times what comes in this time, and the GIL is left to others; a guess
_LONGEST_PAUSE_S = 1e-3  # a guess
_PAUSE_SHARE = 0.005  # a pause is this share of the time since the last frame; a guess


class LandingReceiver(LinkReceiver):
    """A receiver of such a link; subclasses move the bytes and drive their library."""

    def __init__(self, link: AuthenticatedSocket) -> None:
        super().__init__(link)
        self._slots = BlockSlots(self._geometry, link.pool.pool_NHLPBD.device)
        self._direct: set[int] = set()  # grants with unflushed direct writes

    # --- what the library does ------------------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> msgspec.Struct:
        """Starts the library and returns the offer: what the source must know to reach this node's memory. Raises
        TransportError."""

    @abstractmethod
    def _progress(self) -> None:
        """Lets the library handle what has arrived, without waiting."""

    @abstractmethod
    def _fetch(self, frame: LandFrame) -> None:
        """Returns when the slot of `frame` is filled. Raises TransportError."""

    def has_direct_writes(self, grant_id: int) -> bool:
        with self._lock:
            return grant_id in self._direct

    # --- the link's thread ----------------------------------------------------------------------------------

    def _serve_link(self) -> None:
        self._offer()
        self._serve_frames()

    def _offer(self) -> None:
        try:
            offer = self._start()
        except TransportError as error:
            send_frame(self._sock, Refusal(error.message))  # so that the source takes another way
            raise
        send_frame(self._sock, offer)

    def _serve_frames(self) -> None:
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        busy, last_frame_at = False, 0.0
        while True:
            if not busy:
                readable.poll()
            else:
                waited = time.monotonic() - last_frame_at
                self._progress()
                if not readable.poll(0):
                    time.sleep(min(max(_PAUSE_SHARE * waited, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
                    continue
            frame = decode_frame(receive_header(self._sock))
            busy = isinstance(frame, WakeFrame) or (busy and not isinstance(frame, LandingFlushFrame))
            last_frame_at = time.monotonic()
            if not isinstance(frame, WakeFrame):
                error = self._serve(frame)
                send_frame(self._sock, Answer(frame.sequence, error))

    def _serve(self, frame: Frame) -> str:
        try:
            if isinstance(frame, OpenFrame):
                self._open(frame)
            elif isinstance(frame, LandFrame):
                self._land(frame)
            elif isinstance(frame, LandingFlushFrame):
                with self._lock:
                    self._direct.clear()
        except GrantError as error:
            return error.message
        return ""

    def _open(self, frame: OpenFrame) -> None:
        with self._lock:
            self._direct.add(frame.grant_id)
        try:
            with self._grants.writing(frame.grant_id, self.source, frame.block_ids):
                pass  # only the question matters: this link's end answers for what lands later
        except GrantError:
            with self._lock:
                self._direct.discard(frame.grant_id)
            raise

    def _land(self, frame: LandFrame) -> None:
        self._check_shape(frame)
        self._fetch(frame)
        layers = range(frame.first_layer, frame.first_layer + frame.num_layers)
        with self._grants.writing(frame.grant_id, self.source, frame.block_ids):
            self._slots.unpack(frame.slot, self._pool.pool_NHLPBD, frame.block_ids, layers, frame.num_valid)

    def _check_shape(self, frame: LandFrame) -> None:
        self._check_blocks(frame)
        nbytes = self._payload_bytes(frame)
        if not 0 < nbytes <= self._slots.slot_bytes or nbytes != frame.nbytes or not 0 <= frame.slot < NUM_SLOTS:
            raise TransportError(f"{frame.nbytes} bytes for blocks of {nbytes} in slot {frame.slot}")
