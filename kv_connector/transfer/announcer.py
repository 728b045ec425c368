"""Tells a sink, layer by layer, what has arrived of KV that it needs while it is computed. On the transfer thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVLayers
from tandem.kv_connector.transfer.grant_book import GrantBook
from tandem.kv_connector.transports.base import Channel


class LayerAnnouncer:
    """Sends KVLayers behind pushes of layers, each when its bytes are in the sink's pool. On CUDA that is so when the
    stream of pushes gets there, if the channel's writes are done by it; other channels' layers are not announced, and
    the sink begins when all has come."""

    def __init__(
        self, source: NodeKey, book: GrantBook, send: Callable[[NodeKey, KVLayers], None], device: torch.device
    ) -> None:
        self._source, self._book, self._send, self._device = source, book, send, device
        self._pushed: deque[tuple[torch.cuda.Event, KVGrant, int]] = deque()  # in the order of the stream

    def pushed(self, grant: KVGrant, num_layers: int, channel: Channel) -> None:
        """Notes that the model's first `num_layers` layers of what was granted have been pushed. Raises what a flush
        raises."""
        if self._device.type != "cuda":
            channel.flush(grant)
            self._announce(grant, num_layers)
        elif channel.writes_in_stream:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._pushed.append((event, grant, num_layers))

    def announce_arrived(self) -> None:
        """Announces what the device has done by now."""
        while self._pushed and self._pushed[0][0].query():
            _, grant, num_layers = self._pushed.popleft()
            self._announce(grant, num_layers)

    @property
    def is_waiting(self) -> bool:
        return bool(self._pushed)

    def _announce(self, grant: KVGrant, num_layers: int) -> None:
        if self._book.is_over(grant.grant_id):
            return
        message = KVLayers(
            request_id=grant.request_id,
            attempt=grant.attempt,
            grant_id=grant.grant_id,
            grant_signature=grant.signature,
            source_epoch=self._source.epoch,
            num_layers=num_layers,
        )
        self._send(grant.sink, message)
