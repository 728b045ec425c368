"""Base of the channels that read blocks out of a pool of this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch

from tandem.engine.contracts.errors import PeerLostError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import MAX_WRITE_BYTES, OnLost, RegisteredPool, Write


class PoolChannel(ABC):
    """Checks each write against its grant, and reports the loss of the peer once."""

    sums_blocks = sums_layers = writes_in_stream = False

    def __init__(self, source: RegisteredPool, peer: NodeKey, on_lost: OnLost) -> None:
        self.source = source
        self.peer = peer
        self.max_write_bytes = MAX_WRITE_BYTES
        self._on_lost = on_lost
        self._end_lock = threading.Lock()
        self._end_reason = ""  # why the channel takes no more writes

    def write(self, write: Write, pool_NHLPBD: torch.Tensor | None = None) -> None:
        assert pool_NHLPBD is not None or self.source.ranks is None, "blocks that are not whole are gathered first"
        assert write.sums is None or self.sums_blocks, "only a channel with sums_blocks is asked for sums"
        write.check(self.peer)
        self._raise_if_ended()
        if write.pairs:
            self._copy(self.source.pool_NHLPBD if pool_NHLPBD is None else pool_NHLPBD, write)

    @abstractmethod
    def _copy(self, pool_NHLPBD: torch.Tensor, write: Write) -> None: ...

    @abstractmethod
    def flush(self, grant: KVGrant) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Lets go of sockets or mappings. Is called once."""

    def close(self) -> None:
        self._end("the channel was closed here")

    def lose(self, reason: str) -> None:
        """Ends the channel and tells its owner: the peer can't be written to any more."""
        if self._end(reason):
            self._on_lost(self.peer, reason)

    @property
    def ended(self) -> bool:
        return bool(self._end_reason)

    def _end(self, reason: str) -> bool:
        with self._end_lock:
            if self._end_reason:
                return False
            self._end_reason = reason
        self._release()
        return True

    def _raise_if_ended(self) -> None:
        if self._end_reason:
            raise PeerLostError(
                f"{self.peer.node_id} epoch {self.peer.epoch:#x} can't be written to: {self._end_reason}"
            )


class OpenChannels:
    """A transport's channels, one for each sink's node: one to a newer epoch ends the older. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_node: dict[str, PoolChannel] = {}

    def add(self, peer: NodeInfo, channel: PoolChannel) -> None:
        with self._lock:
            superseded = self._by_node.get(peer.node_id)
            self._by_node[peer.node_id] = channel
        if superseded is not None:
            superseded.close()

    def close(self) -> None:
        with self._lock:
            channels, self._by_node = list(self._by_node.values()), {}
        for channel in channels:
            channel.close()
