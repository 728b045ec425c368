"""Digests of what a source sends: summed by the writes themselves where a channel does that, else in a pass over each
push as soon as its last layer is written, so that at the end of the hand-off they only have to be picked up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.kernels.blocks.digest import sent_form, valid_slots
from tandem.kernels.blocks.digest_pass import SumPasses
from tandem.kv_connector.layouts.reshape import Reshaper
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize
from tandem.kv_connector.transfer.grant_sums import GrantSums
from tandem.kv_connector.transports.base import Channel, Write


class SentDigests:
    """Digests of what is sent, made on the transfer thread. Where blocks are reshaped on their way there are no passes
    beside pushes: what is sent exists only while it is staged, so it is staged once more at the end."""

    def __init__(
        self, pool_NHLPBD: torch.Tensor, layout: KVLayout, counters: dict[str, float], are_wanted: bool = True
    ) -> None:
        self.are_wanted = are_wanted
        self._pool_NHLPBD, self._block_size = pool_NHLPBD, layout.block_size
        self._num_last = layout.group.blocks_each  # blocks that the tokens behind the last full ones take
        self._counters = counters
        self._passes = SumPasses(pool_NHLPBD)
        self._grants: dict[int, GrantSums] = {}
        # A pass takes a third of a millisecond for 1 GiB. Behind the computation, of which there is always more, it
        # would wait for the end of the step; before it, it is over before the first token is on the host.
        self._stream = torch.cuda.Stream(pool_NHLPBD.device, priority=-1) if pool_NHLPBD.is_cuda else None

    def warm_up(self) -> None:
        """Compiles the kernels. Must be called before the first step."""
        self._passes.warm_up()

    def with_sums(self, write: Write, channel: Channel, pool_NHLPBD: torch.Tensor | None) -> Write:
        """Returns the write with places for sums of what it moves, if the channel can take them. `pool_NHLPBD` is as in
        `Channel.write`."""
        if not (self.are_wanted and _sums(channel, write.layers)):
            return write
        pool_NHLPBD = self._pool_NHLPBD if pool_NHLPBD is None else pool_NHLPBD
        return write._replace(sums=self._of_grant(write.grant).of_write(pool_NHLPBD, write))

    def pushed(self, push: BlockPush, channel: Channel, layers: range | None, written: torch.cuda.Event | None) -> None:
        """Notes that `layers` (None: all) of a push's blocks, which go as they are, have been enqueued. They are
        complete after the device event `written`; None means that they are already."""
        is_last = layers is None or layers.stop == self._pool_NHLPBD.shape[2]
        if not self.are_wanted or not is_last or _sums(channel, layers):
            return
        sums = self._of_grant(push.grant)
        with self._on_stream():
            if self._stream is not None and written is not None:
                self._stream.wait_event(written)
            begun = self._passes.begin(push.source_block_ids, sums.key, push.num_valid)
        sums.add_pass(push.destination_block_ids, push.num_valid, begun)

    def whole_sums(self, job: Finalize, sink: KVLayout) -> GrantSums | None:
        """The sums of this grant if they cover all its blocks; None, and they are forgotten, if not."""
        sums = self._grants.get(job.grant_id)
        if sums is not None and job.with_digests and sums.are_whole(job, sink.block_size):
            return sums
        self.forget(job.grant_id)
        return None

    def anew(self, job: Finalize, reshaper: Reshaper | None) -> np.ndarray:
        """Makes the digests of the sink's blocks in a pass of its own: little-endian int64 [n]."""
        self._counters["kv_digest_passes"] += 1
        if reshaper is not None:
            size = reshaper.geometry.block_size
            num_valid = valid_slots(job.num_pushed_blocks, job.num_valid_last, size, self._num_last)
            parts = reshaper.parts(job.source_block_ids, job.first_slots, num_valid)
            return reshaper.digests(parts, job.digest_key, job.num_valid_last).cpu().numpy().astype("<i8")
        num_valid = valid_slots(len(job.source_block_ids), job.num_valid_last, self._block_size, self._num_last)
        with self._on_stream():
            sums = self._passes.begin(job.source_block_ids, job.digest_key, num_valid).sums()
        return sent_form(sums, job.digest_key, job.num_valid_last, self._block_size, self._num_last)

    def forget(self, grant_id: int) -> None:
        """Drops what is kept for a grant. When it returns, no block of the grant is read any more."""
        sums = self._grants.pop(grant_id, None)
        if sums is not None:
            sums.abandon()

    @property
    def num_grants(self) -> int:
        """The number of grants whose sums are kept."""
        return len(self._grants)

    def _of_grant(self, grant: KVGrant) -> GrantSums:
        if grant.grant_id not in self._grants:
            self._grants[grant.grant_id] = GrantSums(grant, self._pool_NHLPBD.shape[2], self._num_last)
        return self._grants[grant.grant_id]

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _sums(channel: Channel, layers: range | None) -> bool:
    """Whether the channel's writes of `layers` sum what they move."""
    return channel.sums_blocks and (layers is None or channel.sums_layers)
