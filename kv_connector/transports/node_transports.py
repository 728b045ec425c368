"""All transports of one node behind one object, which the node's main, managers and transfer thread use.

A sink opens each grant on every transport that the source might take (it falls back to the next one when connecting
fails), and a fence is done when all of them have fenced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from tandem.engine.contracts.errors import ConfigError, GrantError, HandshakeError, PeerLostError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.geometry import as_moved
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.transports.base import Channel, OnLost, RegisteredPool, Transport
from tandem.kv_connector.transports.links.nixl import NixlTransport
from tandem.kv_connector.transports.links.tcp import TcpTransport
from tandem.kv_connector.transports.links.ucx import UcxTransport
from tandem.kv_connector.transports.local import LocalTransport
from tandem.kv_connector.transports.mapped.cuda_ipc import CudaIpcTransport
from tandem.kv_connector.transports.mapped.shm import ShmTransport
from tandem.kv_connector.transports.selection import FOR_RANKS, ONLY_WHEN_ASKED, ORDER, candidates, choose_transport

logger = logging.getLogger(__name__)


def make_transports(
    requested: str, device: torch.device, keys: ClusterKeys, host: str, timeout_s: float, has_ranks: bool = False
) -> list[Transport]:
    """Makes the transports that `requested` ("auto" or a name) allows on `device`. With `has_ranks` the node's pool
    lies on other GPUs too. `timeout_s` bounds waits for a peer. Raises ConfigError if none can be used."""
    if requested != "auto" and requested not in ORDER:
        raise ConfigError(f"there is no transport {requested!r}: choose auto, {', '.join(ORDER)}")
    known: tuple[Transport, ...] = (
        LocalTransport(),
        ShmTransport(),
        CudaIpcTransport(),
        NixlTransport(keys, host, timeout_s),
        UcxTransport(keys, host, timeout_s),
        TcpTransport(keys, host, timeout_s),
    )
    if requested == "auto":
        offered = [transport for transport in known if transport.name not in ONLY_WHEN_ASKED]
        return [transport for transport in offered if not _problem(transport, device, has_ranks)]
    (forced,) = [transport for transport in known if transport.name == requested]
    problem = _problem(forced, device, has_ranks)
    if problem:
        raise ConfigError(f"transport {requested} can't be used: {problem}; or choose auto, the best that works here")
    return [forced]


def _problem(transport: Transport, device: torch.device, has_ranks: bool) -> str:
    """Why a node on `device` can't offer `transport`; "" when it can."""
    usable, reason = transport.is_usable(device)
    if usable and has_ranks and transport.name not in FOR_RANKS:
        return "of the GPUs of several ranks it reaches one"
    return "" if usable else reason


class NodeTransports:
    """The transports of one node. Thread-safe after `register`."""

    def __init__(self, transports: Sequence[Transport], requested: str = "auto") -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._requested = requested
        self._device = torch.device("cpu")
        self._lock = threading.Lock()
        self._sources: dict[NodeKey, list[Transport]] = {}
        self.counters = {f"kv_channels_{name}": 0.0 for name in self._transports}  # channels opened as a source

    def pool_storage(self, nbytes: int) -> memoryview | None:
        """Memory for a CPU pool, to be given to `allocate_pool`; None: any memory will do."""
        for transport in self._transports.values():
            storage = transport.pool_storage(nbytes)
            if storage is not None:
                return storage
        return None

    def pool_file(self) -> tuple[int, int] | None:
        """The descriptor, and the offset in bytes, of the memory that `pool_storage` gave; None if it gave none."""
        shm = self._transports.get("shm")
        return shm.pool_file if isinstance(shm, ShmTransport) else None

    def register(self, pool: torch.Tensor, layout: KVLayout, node: NodeKey, ranks: RankPools | None = None) -> None:
        self._device = pool.device
        for transport in self._transports.values():
            transport.register(RegisteredPool(as_moved(pool), layout, node, ranks))

    def exports(self) -> dict[str, bytes]:
        """The value for NodeInfo.transports: an address for each transport, by its name."""
        return {name: transport.export() for name, transport in self._transports.items()}

    def check_peer(self, ours: NodeInfo, peer: NodeInfo) -> None:
        """Raises HandshakeError when no transport can move KV between the two nodes, before each hand-off finds that
        out."""
        try:
            choose_transport(ours, peer, self._requested, self._device)
        except TransportError as error:
            raise HandshakeError("transport", error.message, " ".join(peer.transports) or "none") from error

    def connect(self, ours: NodeInfo, peer: NodeInfo, on_lost: OnLost) -> Channel:
        """Source: a channel by the first transport that works. Raises TransportError, PeerLostError."""
        choose_transport(ours, peer, self._requested, self._device)
        failures = []
        for name in candidates(ours, peer)[0]:
            try:
                channel = self._transports[name].connect(peer, on_lost)
                self.counters[f"kv_channels_{name}"] += 1
                logger.info("KV goes to %s over %s", peer.node_id, name)
                return channel
            except PeerLostError:
                raise
            except TransportError as error:
                logger.warning("no %s channel to %s: %s", name, peer.node_id, error)
                failures.append(f"{name}: {error.message}")
        raise TransportError(f"no channel to {peer.node_id} ({'; '.join(failures)})")

    def admit(self, ours: NodeInfo, peer: NodeInfo) -> None:
        """Sink: admits a peer that said Hello and may become a source. Must be called before the first grant to it.
        Raises TransportError."""
        choose_transport(ours, peer, self._requested, self._device)
        ways = [self._transports[name] for name in candidates(ours, peer)[0]]
        for transport in ways:
            transport.admit(peer)
        with self._lock:
            self._sources[peer.key] = ways

    def open_grant(self, grant: KVGrant) -> None:
        """Sink: opens a grant on the transports that its source might take. Must be called before the grant is sent.
        Raises GrantError when the source was never admitted, or is fenced or gone."""
        with self._lock:
            ways = self._sources.get(grant.source, [])
        if not ways:
            raise GrantError(
                f"{grant.source_id} epoch {grant.source_epoch:#x} was not admitted", request_id=grant.request_id
            )
        for transport in ways:
            transport.open_grant(grant)

    def close_grant(self, grant_id: int) -> None:
        """Sink: closes a grant, whatever ended it; idempotent. Must be called before its blocks are given to anyone."""
        for transport in self._transports.values():
            transport.close_grant(grant_id)

    def is_settled(self, grant_id: int) -> bool:
        """Sink: whether a source's word that it writes no more under this grant may be believed now."""
        settled = [transport.is_settled(grant_id) for transport in self._transports.values()]  # each is asked
        return all(settled)

    def fence(self, source: NodeKey) -> Future[None]:
        """Sink: fences the source on every transport that it may have used; see Transport.fence."""
        with self._lock:
            self._sources.pop(source, None)
        return _all_done([transport.fence(source) for transport in self._transports.values()])

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


def _all_done(futures: Sequence[Future[None]]) -> Future[None]:
    combined: Future[None] = Future()
    lock = threading.Lock()
    num_left = len(futures)

    def one_done(_: Future[None]) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            last = num_left == 0
        if last:
            combined.set_result(None)

    for future in futures:
        future.add_done_callback(one_done)
    return combined
