"""Turns the transfer thread's pushes into writes of bounded size, reshaped and summed where need be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.durations import note_duration
from tandem.kv_connector.layouts.geometry import BlockGeometry
from tandem.kv_connector.layouts.plan import plan
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.layouts.reshape import Reshaper
from tandem.kv_connector.protocol.jobs import BlockPush
from tandem.kv_connector.transfer.channels import PeerChannels
from tandem.kv_connector.transfer.digests import SentDigests
from tandem.kv_connector.transfer.grant_book import GrantBook
from tandem.kv_connector.transfer.trace import HandoffTrace, Moment
from tandem.kv_connector.transports.base import Write

OnPushed = Callable[[AttemptKey, range | None, int, float], None]


def tell_nobody(key: AttemptKey, layers: range | None, num_bytes: int, seconds: float) -> None:
    pass


class Pusher:
    """Cuts pushes into writes, on the transfer thread; on CUDA in its stream of pushes. `counters` are the thread's."""

    def __init__(
        self,
        pool_NHLPBD: torch.Tensor,
        layout: KVLayout,
        channels: PeerChannels,
        book: GrantBook,
        counters: dict[str, float],
        digests: SentDigests,
        trace: HandoffTrace | None,
        ranks: RankPools | None = None,
        on_pushed: OnPushed = tell_nobody,
    ) -> None:
        """`ranks` has the blocks if they are not whole in `pool_NHLPBD`. `on_pushed` is told of each push: its
        hand-off, its layers (None: all), bytes and seconds."""
        self._digests = digests
        self._pool_NHLPBD, self._layout, self._ranks = pool_NHLPBD, layout, ranks
        self._geometry = BlockGeometry(layout)
        self._reshapers: dict[KVLayout, Reshaper | None] = {}  # by the sink's layout
        self._channels, self._book, self._counters, self._trace = channels, book, counters, trace
        self._on_pushed = on_pushed

    def push(self, push: BlockPush, layers: range | None, written: Sequence[Moment] = ()) -> None:
        """Pushes `layers` (None: all) of a push's blocks. `written` has, if traced, the moments at which each layer's
        KV was written. Raises what `Channel.write` raises."""
        if self._trace is None:
            self._push(push, layers)
            return
        on_cuda, before = self._pool_NHLPBD.is_cuda, self._counters["kv_pushed_bytes"]
        begun = Moment.now(on_cuda)
        self._push(push, layers)
        nbytes = self._counters["kv_pushed_bytes"] - before
        first = push.grant.first_block + push.grant.block_ids.index(push.destination_block_ids[0])
        self._trace.pushed(push.key, layers or range(-1, 0), first, written, begun, Moment.now(on_cuda), nbytes)

    def reshaper_to(self, sink: KVLayout) -> Reshaper | None:
        """The reshaper for sinks of this layout; None when blocks go into such a pool as they are."""
        if sink not in self._reshapers:
            as_they_are = self._ranks is None and plan(self._layout, sink).keeps_blocks
            made = None if as_they_are else Reshaper(self._pool_NHLPBD, self._layout, sink, self._ranks)
            self._reshapers[sink] = made
        return self._reshapers[sink]

    def _push(self, push: BlockPush, layers: range | None) -> None:
        way = self._channels.of(push.grant)
        channel, reshaper = way.channel, self.reshaper_to(way.layout)
        geometry, max_blocks = self._geometry, len(push.num_valid)
        if reshaper is not None:
            geometry, max_blocks = reshaper.geometry, reshaper.max_blocks
            parts = reshaper.parts(push.source_block_ids, push.first_slots, push.num_valid)
        num_layers = geometry.num_layers if layers is None else len(layers)
        sizes = [geometry.payload_bytes(num_layers, valid) for valid in push.num_valid]
        started, before = time.monotonic(), self._counters["kv_pushed_bytes"]
        for first, end, nbytes in _portions(sizes, channel.max_write_bytes, max_blocks):
            if self._book.is_over(push.grant_id):
                break
            self._book.unflushed.add(push.grant_id)
            places = slice(first, end)
            staged = None if reshaper is None else reshaper.stage(parts[first:end], layers)
            sources = range(end - first) if reshaper is not None else push.source_block_ids[places]
            pairs = tuple(zip(sources, push.destination_block_ids[places], strict=True))
            write = Write(push.grant, pairs, layers, push.num_valid[places])
            channel.write(self._digests.with_sums(write, channel, staged), staged)
            self._counters["kv_pushed_bytes"] += nbytes
        seconds = time.monotonic() - started
        note_duration(self._counters, "kv_push_s", seconds)
        self._on_pushed(push.key, layers, int(self._counters["kv_pushed_bytes"] - before), seconds)


def _portions(sizes: Sequence[int], limit: int, max_blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, bytes) of consecutive writes of about `limit` bytes and at most `max_blocks` blocks."""
    first, nbytes = 0, 0
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= limit or index + 1 - first == max_blocks:
            yield first, index + 1, nbytes
            first, nbytes = index + 1, 0
    if nbytes:
        yield first, len(sizes), nbytes
