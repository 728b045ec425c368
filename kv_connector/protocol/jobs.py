"""The jobs and events that the hand-off managers (step loop) and the transfer thread exchange. Frozen plain data, no
torch.

Step loop -> transfer thread, one FIFO queue a node:
    StepMoves       travels with a step (`SchedulerOutput.connector_meta`); the worker half turns its pushes into jobs
    BlockPush       blocks whose KV exists: all layers at once
    Flush           after every push queued before it: they have arrived -> Flushed
    Finalize        after every push queued before it: flush, digest, send KVReady -> ReadySent
    Retire          give up or tidy up everything of one grant -> Retired
    Verify          sink side: digests of received blocks -> Verified
    SumArrived      sink side, straight from the control connection: begins what a Verify is about to ask for
Step loop -> transport receiver (sink side): OpenGrant, CloseGrant.

Order is the contract: jobs of one grant run in the order in which they were queued. A job never blocks the queue of
another peer for ever: what can't be written becomes PushFailed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.parts import Continuation, FirstToken
from tandem.engine.scheduling.step import StepMeta

if TYPE_CHECKING:
    import torch


def digest_key(key: AttemptKey, grant_id: int) -> int:
    """64-bit key of a hand-off's block digests, equal on both sides, different for every grant."""
    text = key.request_id.encode()
    raw = len(text).to_bytes(4, "little") + text + key.attempt.to_bytes(8, "little") + grant_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little")


# --- source side: step loop -> worker half and transfer thread -----------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockPush:
    """Sink blocks of one request that are complete once step `step_id` has run. A `step_id` of -1 means that no
    launched step can still be writing them.

    In `StepMoves.pushes`: blocks that become complete in that step (or the partial last block at the prompt's end).
    `save_kv_layer` pushes each layer of them as soon as it is written. In `StepMoves.whole`, or as a job of its own if
    no step is about to be launched and for resends: all layers in one go, when the step has run.

    `num_valid[i]` slots of destination block i hold tokens (the sink's block size except for the prompt's last block).
    Where both sides' block sizes are equal, source block i goes there. Else destination block i begins at slot
    `first_slots[i]` of a source block and may take several: `source_block_ids` lists those of each destination block
    one after the other, so that one may be listed twice (BlockSizes in kv_connector/layouts/plan.py).
    """

    key: AttemptKey
    grant: KVGrant
    source_block_ids: tuple[int, ...]
    destination_block_ids: tuple[int, ...]
    num_valid: tuple[int, ...]
    step_id: int = -1
    first_slots: tuple[int, ...] = ()
    is_awaited: bool = False  # pushed by layers, it completes a grant whose sink is told of each
    table: int = 0  # where it is pushed by layers: of the layers with this block table (LayerPlace)

    @property
    def grant_id(self) -> int:
        return self.grant.grant_id


class LoadEvent(Protocol):
    """`torch.cuda.Event` (orders the current stream after the load) and `threading.Event` (CPU) both fit."""

    def wait(self) -> object: ...


class LayerLoad(Protocol):
    """KV that comes into the pool while the forward pass runs, layer by layer."""

    def start(self, pool: torch.Tensor) -> Mapping[int, LoadEvent]:
        """Starts the copies; layer index -> event after which that layer is complete. Does not block."""


@dataclass(frozen=True, slots=True)
class ArrivingKV:
    """KV that a peer writes under `grant_id` while it computes it. The row in `slot` needs each layer of it, and waits
    until `deadline` (monotonic seconds) at most."""

    grant_id: int
    slot: int
    deadline: float


class StepMoves(StepMeta, frozen=True):
    """The KV moves that go with one step. `whole` is queued before the step's first layer push; if `by_layer` is False,
    what the step itself completes is in `whole` too, and goes out behind the step.

    `is_pushed` says that the step computes prompts that are handed off. Their grants may come while it runs, so the
    worker notes when each layer, or the whole step, is done."""

    step_id: int
    pushes: tuple[BlockPush, ...] = ()
    whole: tuple[BlockPush, ...] = ()
    loads: tuple[LayerLoad, ...] = ()
    arriving: tuple[ArrivingKV, ...] = ()
    is_pushed: bool = True


@dataclass(frozen=True, slots=True)
class Finalize:
    """The prompt is computed. After all pushes of this grant queued before: flush, digest, send KVReady to the sink.

    `source_block_ids` were pushed into `grant.block_ids`, as in BlockPush. The digests are those of the sink's blocks
    as they arrive: of all slots of each, of the last one `num_valid_last`. `with_digests` False leaves
    `KVReady.digests` empty. Answered by ReadySent or PushFailed.
    """

    key: AttemptKey
    grant: KVGrant
    round: int  # goes into KVReady.round
    source_block_ids: tuple[int, ...]
    num_valid_last: int
    digest_key: int
    first_tokens: tuple[FirstToken, ...]
    with_digests: bool = True
    first_slots: tuple[int, ...] = ()
    continuation: Continuation | None = None  # goes into KVReady
    num_blocks: int = 0  # how many leading blocks of the grant were pushed; 0: all

    @property
    def grant_id(self) -> int:
        return self.grant.grant_id

    @property
    def num_pushed_blocks(self) -> int:
        return self.num_blocks or len(self.grant.block_ids)


@dataclass(frozen=True, slots=True)
class Flush:
    """Waits until every push of this grant that was queued before has arrived. Answered by Flushed or PushFailed."""

    key: AttemptKey
    grant: KVGrant

    @property
    def grant_id(self) -> int:
        return self.grant.grant_id


@dataclass(frozen=True, slots=True)
class Retire:
    """End of a grant on the source. Queued jobs of it that have not begun are dropped, the one running is finished and
    flushed; pushes of it that are queued later (steps already launched) are dropped too. Then Retired: from that event
    on no write of this grant can land (nixl, if its link broke: none once the sink believes it, see is_settled), none
    of its source blocks is read, and no KVReady of it will be sent.
    """

    key: AttemptKey
    grant: KVGrant

    @property
    def grant_id(self) -> int:
        return self.grant.grant_id


# --- sink side: step loop -> transfer thread ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verify:
    """Asks to compare the digests of received blocks (8 bytes little-endian each, as in KVReady). Answered by Verified.

    Reads only. The blocks may be freed while it runs (cancel); its answer is then stale and ignored.
    """

    key: AttemptKey
    grant_id: int
    round: int
    block_ids: tuple[int, ...]
    digests: bytes
    digest_key: int
    num_valid_last: int


@dataclass(frozen=True, slots=True)
class SumArrived:
    """Asks to sum the blocks that this KVReady says have arrived, if its grant is open: the step loop's Verify, which
    may have to wait for the end of a launch, then only has to compare. It decides nothing and gets no answer."""

    ready: KVReady


SourceJob = BlockPush | Flush | Finalize | Retire
SinkJob = Verify | SumArrived
TransferJob = SourceJob | SinkJob


# --- transfer thread -> step loop -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadySent:
    """All pushes flushed, KVReady handed to the control connection. The manager keeps `ready` to send it again."""

    key: AttemptKey
    grant_id: int
    ready: KVReady


@dataclass(frozen=True, slots=True)
class Flushed:
    """Answer to Flush."""

    key: AttemptKey
    grant_id: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """A push or Finalize could not be done (connection lost, peer gone). Nothing more of this grant is written unless
    queued anew; writes begun may still be landing until Retired."""

    key: AttemptKey
    grant_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Retired:
    """Answer to Retire."""

    key: AttemptKey
    grant_id: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Answer to Verify: the indices (into its `block_ids`) of the blocks that differ; empty if all are right."""

    key: AttemptKey
    grant_id: int
    round: int
    bad_indices: tuple[int, ...]


TransferEvent = ReadySent | Flushed | PushFailed | Retired | Verified


# --- sink side: step loop -> transport receiver -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenGrant:
    """Writes that name this grant may land in its blocks, from its source only. Comes before the KVGrant is sent."""

    grant: KVGrant


@dataclass(frozen=True, slots=True)
class CloseGrant:
    """Writes of this grant that still arrive are read and thrown away. One-sided transports can't do that: their
    blocks stay quarantined until Retired or a fence."""

    grant_id: int


TransportCommand = OpenGrant | CloseGrant
