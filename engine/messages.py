"""Every message on the control sockets: frozen msgspec Structs, msgpack, one tagged union a direction.

Rules that hold for all of them:
- Times are durations in seconds, never points in time. Epochs are random u64, new with each process.
- `(request_id, attempt)` names one try of one request; a message of an old attempt or epoch is dropped and counted.
- Every verb is idempotent and resent until answered or its deadline. Token ids and hashes travel as raw bytes.
- A connection starts with Hello, answered by Welcome or Refused; nothing else is accepted before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.engine.kv_layout import KVLayout, ModelIdentity
from tandem.engine.sampling_params import SamplingParams

WIRE_VERSION = 1

Role = Literal["router", "prefill", "decode", "unified"]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the tag is the class name."""


# --- connection ---------------------------------------------------------------------------------------------


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks. Routers send no identity (they take the node's) and no layout."""

    node_id: str
    epoch: int
    role: Role
    control_address: str = ""  # where this process accepts control connections; "" for routers
    host_id: str = ""  # equal for processes that share a kernel (boot id + pid namespace)
    pid: int = 0
    identity: ModelIdentity | None = None
    layout: KVLayout | None = None
    model_name: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    # Transport name -> opaque address of this node's pool there (msgpack made and read by that transport alone).
    transports: dict[str, bytes] = {}


def peer_id_of(node_id: str, epoch: int) -> str:
    """The name under which one life of a process is addressed."""
    return f"{node_id}@{epoch:016x}"


class Hello(Message, frozen=True, kw_only=True):
    wire_version: int
    info: NodeInfo


class Welcome(Message, frozen=True, kw_only=True):
    info: NodeInfo


class Refused(Message, frozen=True, kw_only=True):
    field: str
    ours: str
    theirs: str


class Ping(Message, frozen=True, kw_only=True):
    """Heartbeat of the connecting side; the answer is a Status (from nodes). `sequence` is echoed."""

    sequence: int


class Status(Message, frozen=True, kw_only=True):
    """Heartbeat and load of a node."""

    node_id: str
    epoch: int
    sequence: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens accepted and not yet computed
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    draining: bool = False
    counters: dict[str, float] = {}


# --- router <-> node ----------------------------------------------------------------------------------------


class PeerRef(msgspec.Struct, frozen=True):
    node_id: str
    epoch: int
    control_address: str


class Submit(Message, frozen=True, kw_only=True):
    """One attempt of one request, to the node(s) that serve it.

    mode "full": compute the prompt and all tokens here. "prefill": compute the prompt, sample the first token of
    each sample, hand the KV to `peer`. "decode": expect that hand-off from `peer`, then make the other tokens.

    The last `num_prior_output_tokens` of the prompt are output that earlier attempts produced: output_index,
    penalties and min_tokens count them, the random sequence continues after them.
    """

    request_id: str
    attempt: int
    mode: Literal["full", "prefill", "decode"]
    prompt_token_ids: bytes  # int32 little-endian
    block_hashes: bytes = b""  # 16 bytes per full hash block of the prompt; empty: the node hashes itself
    num_prior_output_tokens: int = 0
    sample_indices: tuple[int, ...] = (0,)
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    deadline_s: float = 600.0
    use_prefix_cache: bool = True
    salt: bytes = b""
    peer: PeerRef | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """Valid in every state, answered by Cancelled, idempotent. Empty `sample_indices`: the whole request."""

    request_id: str
    attempt: int
    sample_indices: tuple[int, ...] = ()


class Cancelled(Message, frozen=True, kw_only=True):
    request_id: str
    attempt: int
    sample_indices: tuple[int, ...] = ()


class Accepted(Message, frozen=True, kw_only=True):
    """Answer to Submit. From a decode node it is the ticket: hits pinned, demand counted, no new block taken."""

    request_id: str
    attempt: int
    num_cached_tokens: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top k, best first (ids may repeat)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int = 0  # of the chosen token, 1 is best


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sample. `output_index` is the position of the first of them in the request's whole output."""

    request_id: str
    attempt: int
    sample_index: int
    output_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop or EOS token id that ended it (it is the last of token_ids)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0


class Tokens(Message, frozen=True, kw_only=True):
    """All a step made for one router process."""

    deltas: tuple[TokenDelta, ...]


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """One entry per prompt position from 1 on (position 0 has no prediction). Sent before the first TokenDelta."""

    request_id: str
    attempt: int
    entries: tuple[TokenLogprobs, ...]


class RequestFailed(Message, frozen=True, kw_only=True):
    """The node gives this attempt up. `retryable`: another attempt may succeed (elsewhere or later)."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool


class FlushBlocks(Message, frozen=True, kw_only=True):
    """Administrative: drop every unused cached block (benchmarks and tests). Answered by Status."""


# --- hand-off: source <-> sink ------------------------------------------------------------------------------


class KVClaim(Message, frozen=True, kw_only=True):
    """Source -> sink: I am about to compute this prompt. Answered by KVGrant, KVWait or KVRefused."""

    request_id: str
    attempt: int
    source_id: str
    source_epoch: int
    sink_epoch: int
    num_prompt_tokens: int


class KVWait(Message, frozen=True, kw_only=True):
    """Sink -> source: queued; a KVGrant or KVRefused follows, strictly in the order of claims."""

    request_id: str
    attempt: int
    queue_position: int


class KVGrant(Message, frozen=True, kw_only=True):
    """Sink -> source: leave to write, once, into these blocks.

    `block_ids[i]` receives the prompt's block number `first_block + i`; earlier blocks the sink already holds.
    Signed by the sink over all other fields; the source checks before it writes, the sink checks the echo.
    """

    request_id: str
    attempt: int
    grant_id: int  # random u64, single use
    source_id: str
    source_epoch: int
    sink_id: str
    sink_epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    num_prompt_tokens: int
    lease_s: float
    signature: bytes = b""


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    sample_index: int
    token_id: int
    finished: bool


class KVReady(Message, frozen=True, kw_only=True):
    """Source -> sink: every byte of the grant is written. Answered by KVCommitted, KVResend or KVRefused.

    `digests`: 8 bytes little-endian per granted block, in the order of `block_ids`; the last block's covers its
    valid slots only.
    """

    request_id: str
    attempt: int
    grant_id: int
    grant_signature: bytes
    source_id: str
    source_epoch: int
    sink_epoch: int
    first_tokens: tuple[FirstToken, ...]
    digests: bytes
    round: int = 0  # 0 at first; otherwise of the KVResend that it answers


class KVCommitted(Message, frozen=True, kw_only=True):
    """Sink -> source: taken over. The source's copy is its own prefix cache from here on."""

    request_id: str
    attempt: int
    grant_id: int


class KVResend(Message, frozen=True, kw_only=True):
    """Sink -> source: these blocks (indices into the grant's `block_ids`) did not match: again, then KVReady."""

    request_id: str
    attempt: int
    grant_id: int
    indices: tuple[int, ...]
    round: int = 1  # counts from 1; a KVReady of an older round is a late duplicate


class KVRefused(Message, frozen=True, kw_only=True):
    """Sink -> source: no (more) hand-off for this attempt. The source stops writing and answers KVDrained."""

    request_id: str
    attempt: int
    reason: str


class KVRelease(Message, frozen=True, kw_only=True):
    """Source -> sink: I will not complete this (cancelled, failed, all samples ended). KVDrained follows."""

    request_id: str
    attempt: int
    source_epoch: int
    reason: str


class KVDrained(Message, frozen=True, kw_only=True):
    """Source -> sink: no write of this attempt's grant can land any more. Resent until KVDrainedAck."""

    request_id: str
    attempt: int
    source_epoch: int
    grant_id: int  # 0: never held one


class KVDrainedAck(Message, frozen=True, kw_only=True):
    request_id: str
    attempt: int
    grant_id: int


RouterToNode = Hello | Ping | Submit | Cancel | FlushBlocks
NodeToRouter = (
    Welcome | Refused | Status | Accepted | Tokens | PromptLogprobs | RequestFailed | Cancelled
)
SourceToSink = Hello | Ping | KVClaim | KVReady | KVRelease | KVDrained
SinkToSource = Welcome | Refused | Status | KVWait | KVGrant | KVCommitted | KVResend | KVRefused | KVDrainedAck
ToNode = Hello | Ping | Submit | Cancel | FlushBlocks | KVClaim | KVReady | KVRelease | KVDrained
FromNode = (
    Welcome | Refused | Status | Accepted | Tokens | PromptLogprobs | RequestFailed | Cancelled
    | KVWait | KVGrant | KVCommitted | KVResend | KVRefused | KVDrainedAck
)

encode = msgspec.msgpack.Encoder().encode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
