"""The common part of one-sided transports between processes of one host: all but how memory is mapped and copied.

The source maps the sink's pool and stores into it without the sink's help. Hence:
- the sink can't turn a write away; only the exit of the source's process (its pidfd) proves that none can land;
- a source keeps a mapping no longer than its sink's epoch: it ends when that process exits or a newer epoch connects,
  otherwise a dead node's memory would stay allocated.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch

from tandem.engine.contracts.errors import DecodeError, GrantError, PeerLostError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import MAX_WRITE_BYTES, OnLost, RegisteredPool, Write
from tandem.kv_connector.transports.mapped.processes import ProcessRef, Watch, host_id, process_watcher
from tandem.kv_connector.transports.pool_channel import OpenChannels, PoolChannel


class MappedExport(msgspec.Struct, frozen=True):
    """The value in NodeInfo.transports for these transports. Only the transport that made `handle` can read it."""

    pid: int
    start_time: int
    num_blocks: int
    handle: bytes

    @property
    def process(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_time)


_decode_export: WireDecoder[MappedExport] = WireDecoder(MappedExport)


class Mapping(ABC):
    """Another process's pool in our address space. `close` waits for the copy that is running."""

    max_write_bytes = MAX_WRITE_BYTES  # the most that one copy moves
    sums_blocks = sums_layers = False  # see Channel

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def copy_in(self, source_NHLPBD: torch.Tensor, write: Write) -> bool:
        """Starts (or does) the copy; False when the mapping is closed. Sums blocks only where `sums_blocks` is True."""
        with self._lock:
            if not self._closed:
                self._copy(source_NHLPBD, write)
            return not self._closed

    @abstractmethod
    def flush(self, grant_id: int) -> None:
        """Returns when every copy made so far for this grant is in the other pool. Raises TransportError."""

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._unmap()

    @abstractmethod
    def _copy(self, source_NHLPBD: torch.Tensor, write: Write) -> None: ...

    @abstractmethod
    def _unmap(self) -> None: ...


class MappedTransport(ABC):
    """Manages channels and fences; subclasses export and map memory."""

    name: str
    receiver_writes = False

    def __init__(self) -> None:
        self.pool: RegisteredPool | None = None
        self._host_id = host_id()
        self._lock = threading.Lock()
        self._channels = OpenChannels()
        self._sources: dict[NodeKey, Watch] = {}  # processes that may write into our pool

    @abstractmethod
    def is_usable(self, device: torch.device) -> tuple[bool, str]: ...

    @abstractmethod
    def pool_storage(self, nbytes: int) -> memoryview | None: ...

    @abstractmethod
    def _export_handle(self) -> bytes:
        """The encoded handle by which a peer finds this process's pool."""

    @abstractmethod
    def _map(self, export: MappedExport, layout: KVLayout) -> Mapping:
        """Maps a peer's pool. Raises TransportError."""

    def register(self, pool: RegisteredPool) -> None:
        assert self.pool is None, "a pool is registered once"
        self.pool = pool

    def export(self) -> bytes:
        assert self.pool is not None, "register the pool first"
        me = ProcessRef.current()
        num_blocks = self.pool.pool_NHLPBD.shape[0]
        return msgspec.msgpack.encode(MappedExport(me.pid, me.start_time, num_blocks, self._export_handle()))

    def connect(self, peer: NodeInfo, on_lost: OnLost) -> MappedChannel:
        assert self.pool is not None, "register the pool first"
        assert peer.layout is not None, "only nodes are connected to"
        export = self._peer_export(peer)
        self._check_same_user(export.process)
        channel = MappedChannel(self.pool, peer, self._map(export, peer.layout), on_lost)
        try:
            channel.watch_peer(export.process)
        except PeerLostError:
            channel.close()
            raise
        self._channels.add(peer, channel)
        return channel

    def admit(self, peer: NodeInfo) -> None:
        source = peer.key
        with self._lock:
            if source in self._sources:
                return
        watch = process_watcher().watch(self._peer_export(peer).process, lambda: self._forget_source(source))
        with self._lock:
            self._sources[source] = watch
        if watch.exited.done():
            self._forget_source(source)

    def open_grant(self, grant: KVGrant) -> None:
        with self._lock:
            if grant.source not in self._sources:
                raise GrantError(
                    f"{grant.source_id} epoch {grant.source_epoch:#x} has exited or was never admitted to {self.name}",
                    request_id=grant.request_id,
                )

    def close_grant(self, grant_id: int) -> None:  # noqa: B027
        pass  # proves nothing here: the source writes without asking

    def is_settled(self, grant_id: int) -> bool:
        return True

    def fence(self, source: NodeKey) -> Future[None]:
        with self._lock:
            watch = self._sources.get(source)
        if watch is not None:
            return watch.exited
        gone: Future[None] = Future()
        gone.set_result(None)
        return gone

    def close(self) -> None:
        with self._lock:
            watches, self._sources = list(self._sources.values()), {}
        self._channels.close()
        for watch in watches:
            process_watcher().unwatch(watch)

    def _forget_source(self, source: NodeKey) -> None:
        with self._lock:
            self._sources.pop(source, None)

    def _peer_export(self, peer: NodeInfo) -> MappedExport:
        if peer.host_id != self._host_id:
            raise TransportError(f"{self.name} needs {peer.node_id} on this host, in this pid namespace")
        try:
            return _decode_export(peer.transports[self.name])
        except (KeyError, DecodeError) as error:
            raise TransportError(f"{peer.node_id} exports no pool for {self.name}") from error

    @staticmethod
    def _check_same_user(process: ProcessRef) -> None:
        try:
            owner = Path(f"/proc/{process.pid}").stat().st_uid
        except OSError as error:
            raise PeerLostError(f"process {process.pid} is gone: {error.strerror}") from error
        if owner != os.geteuid():
            raise TransportError(f"process {process.pid} belongs to user {owner}, this one to {os.geteuid()}")


class MappedChannel(PoolChannel):
    """A channel that stores into a mapped pool. It ends with the peer's process."""

    def __init__(self, source: RegisteredPool, peer: NodeInfo, mapping: Mapping, on_lost: OnLost) -> None:
        super().__init__(source, peer.key, on_lost)
        self._mapping = mapping
        self.max_write_bytes = mapping.max_write_bytes
        self.sums_blocks, self.sums_layers = mapping.sums_blocks, mapping.sums_layers
        self.writes_in_stream = True
        self._watch: Watch | None = None

    def watch_peer(self, process: ProcessRef) -> None:
        """Ends the channel when the peer's process exits. Raises PeerLostError when that is gone already, or is not the
        process that the mapping was meant for."""
        self._watch = process_watcher().watch(process, lambda: self.lose("its process exited"))
        if self.ended:
            self._release()

    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None:
        if not self._mapping.copy_in(pool_NHLPBD, write):
            self._raise_if_ended()

    def flush(self, grant: KVGrant) -> None:
        self._raise_if_ended()
        self._mapping.flush(grant.grant_id)

    def _release(self) -> None:
        self._mapping.close()
        if self._watch is not None:
            process_watcher().unwatch(self._watch)
