"""Transport between two nodes of one process. The sink's gate is passed for each block, as over a socket."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from tandem.engine.contracts.errors import GrantError, PeerLostError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.geometry import copy_blocks
from tandem.kv_connector.transports.base import OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.grants import GrantTable
from tandem.kv_connector.transports.pool_channel import OpenChannels, PoolChannel

_registered: dict[NodeKey, LocalTransport] = {}
_registered_lock = threading.Lock()


class LocalTransport:
    """Registry of this process's pools by their nodes."""

    name = "local"
    receiver_writes = True

    def __init__(self) -> None:
        self.grants = GrantTable()
        self.pool: RegisteredPool | None = None
        self._channels = OpenChannels()

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        return True, ""

    def pool_storage(self, nbytes: int) -> memoryview | None:
        return None

    def register(self, pool: RegisteredPool) -> None:
        assert self.pool is None, "a pool is registered once"
        self.pool = pool
        with _registered_lock:
            _registered[pool.node] = self

    def export(self) -> bytes:
        return b""

    def connect(self, peer: NodeInfo, on_lost: OnLost) -> LocalChannel:
        assert self.pool is not None, "register the pool first"
        with _registered_lock:
            sink = _registered.get(peer.key)
        if sink is None:
            raise PeerLostError(f"{peer.node_id} epoch {peer.epoch:#x} has no pool in this process")
        channel = LocalChannel(self.pool, sink, on_lost)
        self._channels.add(peer, channel)
        return channel

    def admit(self, peer: NodeInfo) -> None:
        self.grants.admit(peer.key)

    def open_grant(self, grant: KVGrant) -> None:
        self.grants.open(grant)

    def close_grant(self, grant_id: int) -> None:
        self.grants.close(grant_id)

    def is_settled(self, grant_id: int) -> bool:
        return True

    def fence(self, source: NodeKey) -> Future[None]:
        self.grants.fence(source)
        fenced: Future[None] = Future()
        fenced.set_result(None)
        return fenced

    def close(self) -> None:
        if self.pool is not None:
            with _registered_lock:
                _registered.pop(self.pool.node, None)
        self._channels.close()


class LocalChannel(PoolChannel):
    """The channel to a sink in this process: it copies from pool to pool, a block at a time."""

    def __init__(self, source: RegisteredPool, sink: LocalTransport, on_lost: OnLost) -> None:
        assert sink.pool is not None, "only transports with a pool are found"
        super().__init__(source, sink.pool.node, on_lost)
        self._sink = sink
        self._refused: dict[int, str] = {}  # by grant id, until flushed

    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        sink_pool = self._sink.pool
        if sink_pool is None or _registered.get(self.peer) is not self._sink:
            self.lose("its pool is gone")
        self._raise_if_ended()
        assert sink_pool is not None
        grant = write.grant
        for pair, valid in zip(write.pairs, write.num_valid, strict=True):
            try:
                with self._sink.grants.writing(grant.grant_id, self.source.node, (pair[1],)):
                    copy_blocks(pool_NHLPBD, sink_pool.pool_NHLPBD, [pair], write.layers, [valid])
                    if sink_pool.pool_NHLPBD.is_cuda:
                        torch.cuda.current_stream(sink_pool.pool_NHLPBD.device).synchronize()
            except GrantError as error:
                self._refused[grant.grant_id] = error.message
                raise TransportError(
                    f"{self.peer.node_id} refused: {error.message}", request_id=grant.request_id
                ) from error

    def flush(self, grant: KVGrant) -> None:
        self._raise_if_ended()
        reason = self._refused.pop(grant.grant_id, None)
        if reason is not None:
            raise TransportError(f"{self.peer.node_id} refused: {reason}", request_id=grant.request_id)

    def _release(self) -> None:
        pass
