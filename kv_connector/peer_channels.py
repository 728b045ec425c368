"""The transfer thread's channels to sinks, one an epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.engine.errors import PeerLostError, TandemError
from tandem.engine.messages import KVGrant, NodeInfo
from tandem.kv_connector.transports.base import Channel, OnLost
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tandem.kv_connector.transports.pool_channel import PoolChannel

Connect = Callable[[NodeInfo, OnLost], Channel]


class PeerChannels:
    """`open` belongs to the transfer thread, the rest to any. `on_lost` hears of each channel's loss, or that it could
    not be opened, at most once."""

    def __init__(self, connect: Connect, on_lost: OnLost, fault_injection: str = "") -> None:
        self._connect = connect
        self._on_lost = on_lost
        self._faults = parse_faults(fault_injection) if fault_injection else None
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, int], Channel] = {}

    def open(self, peer: NodeInfo) -> None:
        try:
            channel = self._connect(peer, self._lost)
        except TandemError as error:
            self._on_lost(peer.node_id, peer.epoch, error.message)
            return
        if self._faults is not None:
            assert isinstance(channel, PoolChannel), "faults are injected into channels that read a pool"
            channel = FaultInjector(channel, self._faults)
        with self._lock:
            self._channels[peer.node_id, peer.epoch] = channel

    def of(self, grant: KVGrant) -> Channel:
        """Raises PeerLostError when none leads to the sink that gave `grant`."""
        with self._lock:
            channel = self._channels.get((grant.sink_id, grant.sink_epoch))
        if channel is None:
            raise PeerLostError(f"no channel to {grant.sink_id} epoch {grant.sink_epoch:#x}")
        return channel

    def drop(self, node_id: str, epoch: int) -> None:
        """A write under way in it fails soon."""
        with self._lock:
            channel = self._channels.pop((node_id, epoch), None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _lost(self, node_id: str, epoch: int, reason: str) -> None:
        self.drop(node_id, epoch)
        self._on_lost(node_id, epoch, reason)
