"""The transfer thread's channels to sinks, one for each epoch of a sink."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.contracts.errors import PeerLostError, TandemError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.transports.base import Channel, OnLost
from tandem.kv_connector.transports.faults import FaultInjector, parse_faults
from tandem.kv_connector.transports.pool_channel import PoolChannel

logger = logging.getLogger(__name__)
Connect = Callable[[NodeInfo, OnLost], Channel]


@dataclass(frozen=True, slots=True)
class PeerChannel:
    """A channel to one epoch of a sink, and the layout of the pool that it leads to. `raises_precision`: KV that
    overflows there is kept in 16 bits, by another attempt."""

    channel: Channel
    layout: KVLayout
    raises_precision: bool = False


class PeerChannels:
    """The open channels. `open` belongs to the transfer thread, the rest to any. `on_lost` is called at most once for
    each channel, when it is lost or could not be opened."""

    def __init__(self, connect: Connect, on_lost: OnLost, fault_injection: str = "") -> None:
        self._connect = connect
        self._on_lost = on_lost
        self._faults = parse_faults(fault_injection) if fault_injection else None
        self._lock = threading.Lock()
        self._ways: dict[NodeKey, PeerChannel] = {}

    def open(self, peer: NodeInfo) -> None:
        assert peer.layout is not None, "only nodes are connected to"
        try:
            channel = self._connect(peer, self._lost)
        except TandemError as error:
            self._on_lost(peer.key, error.message)
            return
        except Exception as error:  # out of descriptors, say, or an export that makes no sense: it costs this peer
            logger.exception("can't open a channel to %s", peer.node_id)
            self._on_lost(peer.key, repr(error))
            return
        if self._faults is not None:
            assert isinstance(channel, PoolChannel), "faults are injected into channels that read a pool"
            channel = FaultInjector(channel, self._faults)
        with self._lock:
            self._ways[peer.key] = PeerChannel(channel, peer.layout, peer.precise_tokens > 0)

    def of(self, grant: KVGrant) -> PeerChannel:
        """The channel to the sink that gave `grant`. Raises PeerLostError when there is none."""
        with self._lock:
            way = self._ways.get(grant.sink)
        if way is None:
            raise PeerLostError(f"no channel to {grant.sink_id} epoch {grant.sink_epoch:#x}")
        return way

    def drop(self, sink: NodeKey) -> None:
        """Closes the channel to a sink. A write under way in it fails soon."""
        with self._lock:
            way = self._ways.pop(sink, None)
        if way is not None:
            way.channel.close()

    def close(self) -> None:
        with self._lock:
            ways, self._ways = list(self._ways.values()), {}
        for way in ways:
            way.channel.close()

    def _lost(self, sink: NodeKey, reason: str) -> None:
        self.drop(sink)
        self._on_lost(sink, reason)
