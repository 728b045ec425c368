"""Transport over NIXL: the source writes into the sink's memory by RDMA, or whatever UCX finds between the two hosts.

Each link has an agent on both sides (nixl_agent.py); the sink's hands out its memory to this one source and ends with
the link. Runs of MIN_RUN_BYTES and more go straight into granted blocks, neighbours as one descriptor; shorter ones are
packed into a slot, and the sink stores them. docs/transports.md says what a fence is worth.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.engine.contracts.errors import TransportError
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.geometry import BlockGeometry
from tandem.kv_connector.transports.base import OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.links.landing_channel import LandingChannel
from tandem.kv_connector.transports.links.landing_receiver import LandingReceiver
from tandem.kv_connector.transports.links.landing_transport import LandingTransport
from tandem.kv_connector.transports.links.landing_wire import LandFrame, OpenFrame
from tandem.kv_connector.transports.links.nixl_agent import NixlAgent, device_id, memory_type, nixl_problem

MIN_RUN_BYTES = 64 << 10  # a guess; what it reaches: docs/measurements.md#transports-within-a-host
MAX_WRITE_BYTES = 8 << 20  # a guess
WINDOW_BYTES = 64 << 20  # how much may be under way at once; a guess


class NixlOffer(msgspec.Struct, frozen=True, tag="nixl"):
    """The sink's first frame: names the memory that this source may write."""

    metadata: bytes
    memory: str  # NIXL's memory type
    device: int
    pool_address: int
    num_blocks: int
    stride_bytes: int
    landing_address: int
    slot_bytes: int


class NixlReceiver(LandingReceiver):
    """The sink's end of a NIXL link: its agent, which lets this source write, and the slots for short runs."""

    _agent: NixlAgent | None = None

    def _start(self) -> NixlOffer:
        pool, landing = self._pool.pool_NHLPBD, self._slots.memory
        agent = self._agent = NixlAgent()
        agent.register(pool)
        agent.register(landing)
        return NixlOffer(
            agent.metadata(),
            memory_type(pool),
            device_id(pool),
            pool.data_ptr(),
            pool.shape[0],
            self._geometry.block_stride_bytes,
            landing.data_ptr(),
            self._slots.slot_bytes,
        )

    def _progress(self) -> None:
        assert self._agent is not None, "frames are served while the agent lives"
        self._agent.progress()

    def _fetch(self, frame: LandFrame) -> None:
        pass  # the source sends the frame when the slot is written

    def _stop(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


@dataclass(slots=True)
class _Transfer:
    handle: Any
    nbytes: int
    landing: LandFrame | None  # the frame to send when the transfer is complete


class NixlChannel(LandingChannel):
    """The source's end of a NIXL link: direct writes of long runs, packed slots for the rest."""

    def __init__(
        self, source: RegisteredPool, sock: socket.socket, peer: NodeInfo, on_lost: OnLost, timeout_s: float
    ) -> None:
        super().__init__(source, sock, peer, on_lost, timeout_s)
        self.max_write_bytes = MAX_WRITE_BYTES
        self._offer = _checked(self._receive_offer(NixlOffer), peer, self._slots.slot_bytes)
        self._peer_geometry = BlockGeometry(source.layout, self._offer.stride_bytes)
        self._memory, self._device = memory_type(source.pool_NHLPBD), device_id(source.pool_NHLPBD)
        self._flying: deque[_Transfer] = deque()
        self._flying_bytes = 0
        self._opened: set[int] = set()  # grants that the sink lets us write under directly, until the next flush
        self._agent = NixlAgent()
        try:
            self._agent.register(source.pool_NHLPBD)
            self._agent.register(self._slots.memory)
            self._peer = self._agent.add_peer(self._offer.metadata)
        except Exception as error:
            self._agent.close()
            raise TransportError(f"NIXL can't reach {peer.node_id}: {error}") from error

    # --- Channel --------------------------------------------------------------------------------------------

    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        with self._guarded():
            self._wake()
            direct: list[int] = []
            if pool_NHLPBD is not self.source.pool_NHLPBD:  # not registered; and its order after earlier writes counts
                self._wait(self._is_idle)
            else:
                span = write.span(self._geometry.num_layers)
                direct = [index for index, valid in enumerate(write.num_valid) if self._is_direct(span, valid)]
            staged = sorted(set(range(len(write.pairs))) - set(direct))
            if direct:
                self._write_direct(write.take(direct))
            if staged:
                self._write_staged(pool_NHLPBD, write.take(staged))
            self._poll_library()

    def flush(self, grant: KVGrant) -> None:
        self._opened.clear()
        super().flush(grant)

    # --- inside, under the lock -----------------------------------------------------------------------------

    def _is_direct(self, layers: range, valid: int) -> bool:
        return all(nbytes >= MIN_RUN_BYTES for _, nbytes in self._geometry.runs(0, layers, valid))

    def _write_direct(self, write: Write) -> None:
        self._open(write.grant)
        layers = write.span(self._geometry.num_layers)
        runs: list[list[int]] = []  # address here, address there, bytes
        here, there = self.source.pool_NHLPBD.data_ptr(), self._offer.pool_address
        for (source, destination), valid in zip(write.pairs, write.num_valid, strict=True):
            ours, theirs = (
                self._geometry.runs(source, layers, valid),
                self._peer_geometry.runs(destination, layers, valid),
            )
            for (start, nbytes), (peer_start, _) in zip(ours, theirs, strict=True):
                last = runs[-1] if runs else None
                if last and last[0] + last[2] == here + start and last[1] + last[2] == there + peer_start:
                    last[2] += nbytes
                else:
                    runs.append([here + start, there + peer_start, nbytes])
        self._wait_for_device()
        self._fly(np.array(runs, dtype=np.uint64), None)

    def _open(self, grant: KVGrant) -> None:
        if grant.grant_id in self._opened:
            return
        outside = [block for block in grant.block_ids if not 0 <= block < self._offer.num_blocks]
        if outside:
            raise TransportError(f"the grant names blocks {outside[:8]}, outside the sink's pool")
        sequence = self._ask(OpenFrame(0, grant.grant_id, grant.block_ids))
        self._wait(lambda: sequence not in self._asked)
        if grant.grant_id in self._refused:
            reason = self._refused[grant.grant_id]
            raise TransportError(f"{self.peer.node_id} refused: {reason}", request_id=grant.request_id)
        self._opened.add(grant.grant_id)

    def _send_slot(self, frame: LandFrame) -> None:
        offset = frame.slot * self._offer.slot_bytes
        run = [self._slots.memory.data_ptr() + offset, self._offer.landing_address + offset, frame.nbytes]
        self._fly(np.array([run], dtype=np.uint64), frame)

    def _fly(self, runs: np.ndarray, landing: LandFrame | None) -> None:
        """Starts to write `runs`, uint64 [n, 3] of (address here, address there, bytes)."""
        local = np.full_like(runs, self._device)
        local[:, :2] = runs[:, (0, 2)]
        remote = np.full_like(runs, self._offer.device)
        remote[:, :2] = runs[:, 1:]
        handle, done = self._agent.start_write(self._peer, local, self._memory, remote, self._offer.memory)
        nbytes = int(runs[:, 2].sum())
        self._flying.append(_Transfer(handle, nbytes, landing))
        self._flying_bytes += nbytes
        if done and len(self._flying) == 1:
            self._land_first()
        self._wait(lambda: self._flying_bytes <= WINDOW_BYTES)

    def _poll_library(self) -> bool:
        moved = False
        while self._flying and self._agent.is_complete(self._flying[0].handle):
            self._land_first()
            moved = True
        return moved

    def _land_first(self) -> None:
        transfer = self._flying.popleft()
        self._flying_bytes -= transfer.nbytes
        transfer.handle.release()
        if transfer.landing is not None:
            self._ask(transfer.landing)

    def _is_idle(self) -> bool:
        return not self._flying

    def _stop(self) -> None:
        while self._flying:
            try:
                self._flying.popleft().handle.release()
            except Exception:  # the library keeps it and lets go of it with the agent
                pass
        self._agent.close()


class NixlTransport(LandingTransport):
    """KV by NIXL. A source's agent writes into the sink's pool itself, so a fence ends the sink's agent for it."""

    name = "nixl"
    receiver_writes = False
    channel = NixlChannel
    receiver = NixlReceiver

    def _problem(self) -> str:
        return nixl_problem()


def _checked(offer: NixlOffer, peer: NodeInfo, slot_bytes: int) -> NixlOffer:
    assert peer.layout is not None, "only nodes are connected to"
    if offer.stride_bytes != peer.layout.stride_bytes or offer.slot_bytes != slot_bytes:
        raise TransportError(f"{peer.node_id} offers a pool that does not fit its layout")
    return offer
