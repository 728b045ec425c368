"""Transport over UCX's tagged messages through ucxx, for machines with a UCX build of their own.

ucxx's Python interface has no remote memory access, so all blocks travel packed, slot by slot, and the sink stores
them: its pool is never within a source's reach. Each link has a worker on both sides, driven by one thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import socket
import time
from collections import deque
from typing import Any

import msgspec
import torch

from tandem.engine.contracts.errors import PeerLostError, TransportError
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.links.landing_channel import POLL_PAUSE_S, LandingChannel
from tandem.kv_connector.transports.links.landing_receiver import LandingReceiver
from tandem.kv_connector.transports.links.landing_transport import LandingTransport
from tandem.kv_connector.transports.links.landing_wire import LandFrame


class UcxOffer(msgspec.Struct, frozen=True, tag="ucx"):
    """The sink's first frame."""

    worker_address: bytes
    slot_bytes: int


def ucx_problem() -> str:
    """What to do about ucxx not being installed; "" when it is."""
    if importlib.util.find_spec("ucxx") is None:
        return (
            "the package ucxx is not installed: pip install 'tandem-serve[ucx]', or ucxx over a UCX build of your own"
        )
    return ""


class UcxWorker:
    """A UCX worker; all calls must come from one thread."""

    def __init__(self) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            self._library: Any = importlib.import_module("ucxx._lib.libucxx")
            self._array: Any = importlib.import_module("ucxx._lib.arr").Array
            context = self._library.UCXContext({}, feature_flags=(self._library.Feature.TAG,))
            self._worker: Any = self._library.UCXWorker(context)
        except Exception as error:
            raise TransportError(f"ucxx can't start a worker: {error}") from error

    def address(self) -> bytes:
        return bytes(memoryview(self._worker.address))

    def connect(self, address: bytes) -> Any:
        """Returns an endpoint that leads to the worker with that address."""
        remote = self._library.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(remote, True)

    def send(self, endpoint: Any, memory: torch.Tensor, tag: int) -> Any:
        return endpoint.tag_send(self._array(_exposed(memory)), self._library.UCXXTag(tag))

    def receive(self, memory: torch.Tensor, tag: int) -> Any:
        library = self._library
        return self._worker.tag_recv(self._array(_exposed(memory)), library.UCXXTag(tag), library.UCXXTagMaskFull)

    def is_complete(self, request: Any) -> bool:
        """Drives the worker and returns whether the message is complete. Raises ucxx's error when it has failed."""
        self._worker.progress()
        if request.completed:
            request.check_error()
            return True
        return False

    def progress(self) -> None:
        self._worker.progress()


def _exposed(memory: torch.Tensor) -> Any:
    return memory if memory.is_cuda else memory.numpy()


class UcxReceiver(LandingReceiver):
    """The sink's end of a UCX link: it takes each announced message into a slot, and stores that."""

    _worker: UcxWorker | None = None

    def _start(self) -> UcxOffer:
        self._worker = UcxWorker()
        return UcxOffer(self._worker.address(), self._slots.slot_bytes)

    def _progress(self) -> None:
        assert self._worker is not None, "frames are served while the worker lives"
        self._worker.progress()

    def _fetch(self, frame: LandFrame) -> None:
        assert self._worker is not None, "frames are served while the worker lives"
        request = self._worker.receive(self._slots.view(frame.slot, frame.nbytes), frame.sequence)
        ended = select.poll()
        ended.register(self._sock, select.POLLRDHUP)
        deadline = time.monotonic() + self._timeout_s
        while not self._worker.is_complete(request):
            if ended.poll(0):
                raise PeerLostError("the source closed the KV link inside a message")
            if time.monotonic() > deadline:
                raise TransportError("no message in time: the source is stopped, overloaded or unreachable")
            time.sleep(POLL_PAUSE_S)

    def _stop(self) -> None:
        self._worker = None  # its end cancels a message that is being received, into a slot that only we read


class UcxChannel(LandingChannel):
    """The source's end of a UCX link: writes packed into slots, a tagged message each."""

    def __init__(
        self, source: RegisteredPool, sock: socket.socket, peer: NodeInfo, on_lost: OnLost, timeout_s: float
    ) -> None:
        super().__init__(source, sock, peer, on_lost, timeout_s)
        offer = self._receive_offer(UcxOffer)
        if offer.slot_bytes != self._slots.slot_bytes:
            raise TransportError(f"{peer.node_id} has slots of {offer.slot_bytes} bytes, not {self._slots.slot_bytes}")
        self._worker: UcxWorker | None = UcxWorker()
        try:
            self._endpoint = self._worker.connect(offer.worker_address)
        except Exception as error:
            raise TransportError(f"UCX can't reach {peer.node_id}: {error}") from error
        self._flying: deque[Any] = deque()

    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        with self._guarded():
            self._wake()
            self._write_staged(pool_NHLPBD, write)
            self._poll_library()

    def _send_slot(self, frame: LandFrame) -> None:
        assert self._worker is not None, "an open channel has its worker"
        sequence = self._ask(frame)
        self._flying.append(self._worker.send(self._endpoint, self._slots.view(frame.slot, frame.nbytes), sequence))

    def _poll_library(self) -> bool:
        assert self._worker is not None, "an open channel has its worker"
        moved = False
        while self._flying and self._worker.is_complete(self._flying[0]):
            self._flying.popleft()
            moved = True
        return moved

    def _is_idle(self) -> bool:
        return not self._flying

    def _stop(self) -> None:
        self._flying.clear()
        self._endpoint = self._worker = None


class UcxTransport(LandingTransport):
    """KV by UCX's tagged messages. The sink alone writes into its pool."""

    name = "ucx"
    receiver_writes = True
    channel = UcxChannel
    receiver = UcxReceiver

    def _problem(self) -> str:
        return ucx_problem()
