"""What messages are made of: who speaks, who is meant, tokens. Import them from `engine/contracts/wire`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.kv_layout import KVLayout, ModelIdentity

# What is decoded within these bounds can be counted and calculated with; anything else is no message.
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Role = Literal["router", "prefill", "decode", "unified"]
Task = Literal["generate", "embed", "score"]  # what a model does
FinishReason = Literal["stop", "length"]
# Code of a node to which others did not bring chunks of a prompt: the next attempt at the request gets no help.
HELP_LOST = "help_lost"
KV_OVERFLOW = "kv_overflow"  # code of a node that the next attempt at the request needs KV of 16 bits
# What an encoder's output is filled up to, so that the decoder begins in a block of its own: block sizes divide it.
SPAN_MULTIPLE = 64  # the default block size


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the tag is the class name."""


class AttemptMessage(Message, frozen=True, kw_only=True):
    """Base of what is said about one attempt."""

    request_id: str
    attempt: int

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class EncoderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. `max_positions` is the longest output of the encoder, and of audio the only one;
    `max_decoder_len` counts the decoder's prompt and output. `prompt` is how the decoder begins. It never draws
    `suppressed`, and not `suppressed_first` as its first token."""

    kind: Literal["text", "audio"]
    max_positions: Count
    max_decoder_len: Count
    prompt: tuple[Count, ...] = ()
    suppressed: tuple[Count, ...] = ()
    suppressed_first: tuple[Count, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Positions of the longest sequence."""
        return span_length(self.max_positions) + self.max_decoder_len


def span_length(num_positions: int) -> int:
    """Positions of a sequence that stand for so many of the encoder's output."""
    return -(-num_positions // SPAN_MULTIPLE) * SPAN_MULTIPLE


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks. Routers send no identity (they take the node's) and no layout."""

    node_id: str
    epoch: int
    role: Role
    control_address: str = ""  # where this process accepts control connections; "" for routers
    host_id: str = ""  # equal for processes that share a kernel (boot id + pid namespace)
    pid: int = 0
    version: str = ""  # of the package, for people: what may work together is decided by WIRE_VERSION and identity
    identity: ModelIdentity | None = None
    layout: KVLayout | None = None  # of whole blocks, whatever the ranks
    num_ranks: Count = 1  # processes with a part of the model each
    group_size: Count = 1  # nodes that share the model's experts out, this one counted
    model_name: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    task: Task = "generate"
    media_kinds: tuple[str, ...] = ()  # what the model takes beside text
    encoder: EncoderFacts | None = None
    precise_tokens: Count = 0  # beside a pool of fp8: most tokens of a request whose KV it keeps in 16 bits
    # The width of a model's vectors, then those to which they may be cut; any if none follows. (): it has no vectors.
    embedding_sizes: tuple[int, ...] = ()
    # Transport name -> opaque address of this node's pool there (msgpack made and read by that transport alone).
    transports: dict[str, bytes] = {}

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.node_id, self.epoch)

    @property
    def most_precise_tokens(self) -> float:
        """Most tokens of a request whose KV is kept in at least 16 bits here."""
        longest = self.max_model_len or math.inf
        is_fp8 = self.layout is not None and self.layout.group.dtype == "float8_e4m3fn"
        return min(longest, self.precise_tokens) if is_fp8 else longest


class PeerRef(msgspec.Struct, frozen=True):
    """One life of a node, and the address at which it accepts control connections."""

    node_id: str
    epoch: int
    control_address: str

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.node_id, self.epoch)


MAX_TARGET_MS = 1e6  # a guess: a quarter of an hour means no target
TargetMs = Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)]


class Targets(msgspec.Struct, frozen=True, array_like=True):
    """What is promised to a request, in seconds; 0.0: nothing, or what its node promises to all (docs/deadlines.md)."""

    ttft_s: Seconds = 0.0  # from its arrival at the router to its first token
    tpot_s: Seconds = 0.0  # a token, on average from the first to each later one
    itl_max_s: Seconds = 0.0  # between two tokens

    @classmethod
    def of_milliseconds(cls, ttft: float | None, tpot: float | None, itl_max: float | None) -> Targets:
        return cls((ttft or 0.0) / 1e3, (tpot or 0.0) / 1e3, (itl_max or 0.0) / 1e3)

    def or_else(self, others: Targets) -> Targets:
        """These, and `others` where these promise nothing."""
        return Targets(self.ttft_s or others.ttft_s, self.tpot_s or others.tpot_s, self.itl_max_s or others.itl_max_s)


NO_TARGETS = Targets()


MARK_BYTES = 8  # a guess: two adapters alike would be priced wrongly, no more


class AdapterRef(msgspec.Struct, frozen=True):
    """The adapter that a request is for: its folder, as nodes see it, and what that must hold."""

    path: str
    digest: bytes  # as AdapterFiles makes it

    @property
    def mark(self) -> bytes:
        """What tells it from others where a mistake makes placement worse and no answer wrong."""
        return self.digest[:MARK_BYTES]


class PrefixHint(msgspec.Struct, frozen=True):
    """Where to pull a prompt's prefix from: `peer` is believed to have its first `num_tokens` tokens cached."""

    peer: PeerRef
    num_tokens: int


class SharedWork(msgspec.Struct, frozen=True, kw_only=True):
    """A helper's share of a prompt that several nodes compute (docs/pipelined_prompts.md). Chunk i ends at token
    `ends[i]`; `nodes[i % len(nodes)]` computes it, and hands it to each other that has a later one. The hand-off of
    chunk i to node k has the name `name`/i/k. The rest is as in Submit."""

    name: str
    token_ids: bytes  # int32 little-endian, up to the end of this helper's last chunk
    ends: tuple[Count, ...]
    nodes: tuple[PeerRef, ...]  # the first has the prompt
    place: Count  # of this helper in `nodes`
    salt: bytes = b""
    num_public_tokens: int = 0
    context: bytes = b""
    priority: int = 0
    targets: Targets = NO_TARGETS
    waited_s: Seconds = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top k, best first (ids may repeat)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int = 0  # of the chosen token, 1 is best


class Candidates(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that may follow a beam, likeliest first, with their log-probabilities (natural). `ends`: those of them
    after which the beam's grammar has room for nothing."""

    token_ids: tuple[Count, ...]
    logprobs: tuple[float, ...]
    ends: tuple[Count, ...] = ()


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """What a running sequence hands over besides blocks. `token_ids` are those after its Submit's prompt, oldest first;
    the client has them all. Its blocks hold the KV of `num_tokens` tokens: all but the newest."""

    num_tokens: Count
    token_ids: tuple[Count, ...]


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The token that a source drew for one sample when its prompt was computed, and whether it ended the sample. Of a
    request that searches with beams nothing was drawn yet: its first sample has the candidates."""

    sample_index: Count
    token_id: Count
    finished: bool
    candidates: Candidates | None = None
