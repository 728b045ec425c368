"""The interface of transports, which move blocks of one node's pool into granted blocks of another node's pool.

    register(pool) → export() → [handshake carries NodeInfo] → admit(source) on the sink, connect(sink) on the source
    → open_grant → Channel.write … Channel.flush → close_grant; fence(source) when the source can't be asked.

Legend of shapes: N num_blocks, H num_kv_heads, L num_layers, P planes (K and V), B block_size, D head_dim.
Pools are pool_NHLPBD; one block is contiguous, its stride may exceed its payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kernels.blocks.digest import BlockSums
from tandem.kv_connector.layouts.rank_pools import RankPools

# Called at most once a channel, from any thread: (peer, reason). The channel takes no more writes.
OnLost = Callable[[NodeKey, str], None]
BlockPairs = Sequence[tuple[int, int]]  # (source block id, destination block id)
MAX_WRITE_BYTES = 4 << 20  # a guess; what it reaches: docs/measurements.md#transports-within-a-host


@dataclass(frozen=True, slots=True)
class PairSums:
    """The place for sums that a write takes of its blocks, for digests: that of pair i is `sums[indices[i]]`."""

    sums: BlockSums
    indices: Sequence[int]


class Write(NamedTuple):
    """A copy that a source makes under a grant: of pair i the slots 0 … num_valid[i]-1 of `layers` (None: all). It has
    sums only where the channel has `sums_blocks`, and `sums_layers` unless all layers are written."""

    grant: KVGrant
    pairs: BlockPairs
    layers: range | None
    num_valid: Sequence[int]
    sums: PairSums | None = None

    def span(self, num_layers: int) -> range:
        """The layers as a range, for blocks of `num_layers` layers."""
        return range(num_layers) if self.layers is None else self.layers

    def take(self, indices: Sequence[int]) -> Write:
        """The part of this write that has the pairs at `indices`, which ascend."""
        if len(indices) == len(self.pairs):
            return self
        pairs, num_valid, sums = [self.pairs[i] for i in indices], [self.num_valid[i] for i in indices], self.sums
        if sums is not None:
            sums = PairSums(sums.sums, [sums.indices[i] for i in indices])
        return Write(self.grant, pairs, self.layers, num_valid, sums)

    def check(self, sink: NodeKey) -> None:
        """The source's own check before bytes leave: raises GrantError if the grant does not cover this write."""
        assert len(self.pairs) == len(self.num_valid), "one number of valid slots a pair"
        grant = self.grant
        if grant.sink != sink:
            raise GrantError(
                f"grant {grant.grant_id:#x} is for {grant.sink}, the channel leads to {sink}",
                request_id=grant.request_id,
            )
        granted = set(grant.block_ids)
        for _, destination in self.pairs:
            if destination not in granted:
                raise GrantError(
                    f"block {destination} is not part of grant {grant.grant_id:#x}", request_id=grant.request_id
                )


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """A node's pool as its transports see it. `ranks` has the blocks if `pool_NHLPBD` has only some of their heads."""

    pool_NHLPBD: torch.Tensor
    layout: KVLayout
    node: NodeKey
    ranks: RankPools | None = None


class Channel(Protocol):
    """One source's way into one sink's pool. `write` and `flush` belong to one thread, `close` to any."""

    peer: NodeKey
    max_write_bytes: int  # a longer push is split, so that the end of its grant is noticed between two writes
    sums_blocks: bool  # whether writes take up `sums` while they read the blocks
    writes_in_stream: bool  # on CUDA: whether a write has arrived when the stream that it was made on gets there
    sums_layers: bool  # whether also writes of some layers do, beside a computation that this does not slow down

    def write(self, write: Write, pool_NHLPBD: torch.Tensor | None = None) -> None:
        """Starts (or does) the copy, on CUDA ordered after the current stream's work. Source block ids index
        `pool_NHLPBD` (None: the node's pool), whose blocks are laid out like the sink's; those of another pool than the
        node's have been read when it returns, on CUDA when the current stream gets there.

        Raises GrantError (nothing moved) for a destination outside the grant or a grant of another sink epoch;
        TransportError, PeerLostError when the bytes can't be moved: the destination is then undefined.
        """

    def flush(self, grant: KVGrant) -> None:
        """Returns when every write made under `grant` is in the sink's memory; raises TransportError if one is not."""

    def close(self) -> None:
        """Idempotent. A write in progress in another thread fails with PeerLostError soon."""


class Transport(Protocol):
    """One way to move blocks, both halves: a node is source and sink at once."""

    name: str
    receiver_writes: bool  # True: close_grant alone proves that no write can land; False: only Drained or fence does

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        """Whether pools on `device` can be moved this way, and if not, why."""

    def pool_storage(self, nbytes: int) -> memoryview | None:
        """Zeroed memory that the pool must live in (engine/device/kv_pool.py's `storage`); None: any memory will do."""

    def register(self, pool: RegisteredPool) -> None:
        """Tells the transport the node's pool. Must be called once, before any method below."""

    def export(self) -> bytes:
        """Address of this node's pool for peers: the value of NodeInfo.transports[name]."""

    def connect(self, peer: NodeInfo, on_lost: OnLost) -> Channel:
        """Source: a channel to `peer`; one to an older epoch of the same node is closed. Raises TransportError."""

    def admit(self, peer: NodeInfo) -> None:
        """Sink: `peer` was greeted and may (again) be a source. Raises TransportError if no fence of it would end."""

    def open_grant(self, grant: KVGrant) -> None:
        """Sink: writes under this grant may land from here on. Idempotent. Raises GrantError for a fenced source."""

    def close_grant(self, grant_id: int) -> None:
        """Sink: if `receiver_writes`, returns when no write under this grant can land any more. Idempotent."""

    def is_settled(self, grant_id: int) -> bool:
        """Sink: False while writes that the source began under this grant were not flushed, whatever the source says.

        A KVDrained must not be believed then. Its repetition may be: whatever still writes is being ended."""

    def fence(self, source: NodeKey) -> Future[None]:
        """Sink: done when no write under any grant of that source opened so far can land any more.

        It gets no new grants until it is admitted again. Callbacks of the future run on any thread."""

    def close(self) -> None:
        """Lets go of every channel, peer and thread."""
