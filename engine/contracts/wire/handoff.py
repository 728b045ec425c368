"""The hand-off's messages, between source and sink; docs/protocol.md says when each is sent."""

from __future__ import annotations

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import AttemptMessage, Continuation, Count, FirstToken, Seconds, SharedWork


class KVPull(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: push me blocks of this chain that you have cached now. Answered by a KVClaim for as many leading
    ones as there are, which begins a hand-off like any other, or by KVRelease.

    Its name is this hand-off's own: no request's of a router.
    `block_hashes`: 16 bytes a block of the sink's size, from the first block of the prompt on; blocks from
    `first_block` on are wanted. `deadline_s`: how long the sink will wait. With `work`, no blocks are named: the
    source is to compute chunks of a prompt together with the sink, or to refuse. It agrees by claiming all of them.
    """

    source_epoch: int
    sink_epoch: int
    first_block: Count
    block_hashes: bytes
    deadline_s: Seconds
    work: SharedWork | None = None


class KVClaim(AttemptMessage, frozen=True, kw_only=True):
    """Source -> sink: I am about to compute this prompt, or I have this many tokens of what a KVPull asks for. For a
    running sequence: the most tokens that it may have when it is handed over. Answered by KVGrant, KVWait or
    KVRefused. The source has freed what is before token `first_kept`, since it slid out of every layer's window: the
    grant must begin there or later."""

    source_id: str
    source_epoch: int
    sink_epoch: int
    num_prompt_tokens: Count
    first_kept: Count = 0


class KVWait(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: queued; a KVGrant or KVRefused follows, strictly in the order of claims."""


class KVGrant(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: leave to write, once, into these blocks.

    `block_ids[i]` receives the prompt's block number `first_block + i`; earlier blocks the sink already holds, or they
    are before every window. Where blocks have window blocks, those of each block from `first_window` on follow it in
    the list (kv_connector/layouts/granted_blocks.py).
    Signed by the sink over all other fields; the source checks before it writes, the sink checks the echo.
    """

    grant_id: int  # random u64, single use
    source_id: str
    source_epoch: int
    sink_id: str
    sink_epoch: int
    first_block: Count
    block_ids: tuple[Count, ...]
    num_prompt_tokens: Count
    lease_s: Seconds
    signature: bytes = b""
    first_window: Count = 0

    @property
    def source(self) -> NodeKey:
        return NodeKey(self.source_id, self.source_epoch)

    @property
    def sink(self) -> NodeKey:
        return NodeKey(self.sink_id, self.sink_epoch)


class KVLayers(AttemptMessage, frozen=True, kw_only=True):
    """Source -> sink: the model's first `num_layers` layers of all granted blocks are written. Sent for what is
    computed for a sink that needs it layer by layer; not answered, since a KVReady follows that says the same of all
    layers."""

    grant_id: int
    grant_signature: bytes
    source_epoch: int
    num_layers: Count


class KVReady(AttemptMessage, frozen=True, kw_only=True):
    """Source -> sink: every byte of the grant is written. Answered by KVCommitted, KVResend or KVRefused.

    `digests`: 8 bytes little-endian per granted block, in the order of `block_ids`; the last block's covers its
    valid slots only. A running sequence says in `continuation` how long it has become; granted blocks behind its last
    one were not written and have no digest.
    """

    grant_id: int
    grant_signature: bytes
    source_id: str
    source_epoch: int
    sink_epoch: int
    first_tokens: tuple[FirstToken, ...]
    digests: bytes
    round: int = 0  # 0 at first; otherwise the round of the KVResend that it answers
    continuation: Continuation | None = None


class KVCommitted(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: the KV is taken over. The source's copy is its own prefix cache from here on."""

    grant_id: int


class KVResend(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: these blocks (indices into the grant's `block_ids`) did not match. Push them again, then send
    KVReady."""

    grant_id: int
    indices: tuple[Count, ...]
    round: int = 1  # counts from 1; a KVReady of an older round is a late duplicate


class KVRefused(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: no (more) hand-off for this attempt. The source stops writing and answers KVDrained."""

    reason: str


class KVRelease(AttemptMessage, frozen=True, kw_only=True):
    """Source -> sink: I will not complete this (cancelled, failed, all samples ended). KVDrained follows."""

    source_epoch: int
    reason: str


class KVDrained(AttemptMessage, frozen=True, kw_only=True):
    """Source -> sink: no write of this attempt's grant can land any more. Resent until KVDrainedAck."""

    source_epoch: int
    grant_id: int  # 0: never held one


class KVDrainedAck(AttemptMessage, frozen=True, kw_only=True):
    """Sink -> source: KVDrained has arrived; the source may forget the attempt."""

    grant_id: int
