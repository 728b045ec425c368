"""What routers ask of nodes, and what nodes answer: requests, tokens, running sequences on the move."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import (
    NO_TARGETS,
    AdapterRef,
    AttemptMessage,
    Count,
    FinishReason,
    Message,
    PeerRef,
    PrefixHint,
    Seconds,
    Targets,
    TokenLogprobs,
)


class Submit(AttemptMessage, frozen=True, kw_only=True):
    """One attempt of one request, to the node(s) that serve it.

    mode "full": compute the prompt and all tokens here. "prefill": compute the prompt, sample the first token of
    each sample, hand the KV to `peer`. "decode": expect that hand-off from `peer`, then make the other tokens.

    The last `num_prior_output_tokens` of the prompt are output that earlier attempts produced: output_index,
    penalties and min_tokens count them, the random sequence continues after them.
    """

    mode: Literal["full", "prefill", "decode"]
    prompt_token_ids: bytes  # int32 little-endian; below 0 in the spans of `media`
    media: tuple[MediaItem, ...] = ()  # in the order of their spans, which hold no prior output
    num_prior_output_tokens: int = 0
    sample_indices: tuple[int, ...] = (0,)
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    targets: Targets = NO_TARGETS
    waited_s: Seconds = 0.0  # since it came to the router
    deadline_s: float = 600.0
    use_prefix_cache: bool = True
    # Who may find its blocks (docs/security.md). The first 16 bytes of a salt name the tenant.
    salt: bytes = b""
    num_public_tokens: int = 0  # leading prompt tokens that are hashed without the salt, in whole hash blocks
    # A digest of what decides the KV beside the tokens; it enters every block hash.
    context: bytes = b""
    adapter: AdapterRef | None = None  # whose weights beside the model's; its digest is part of `context`
    is_precise: bool = False  # in mode "full": its KV is kept in at least 16 bits, whatever the pool's dtype
    cache_share: float = 1.0  # share of each cache on the node that the tenant may fill
    peer: PeerRef | None = None
    # Mode "decode": `peer` runs this one sample already, and has, or will have, more output than the prompt's.
    is_running: bool = False
    # For a node that pools: the token at which the second text of a pair begins; 0: the prompt is one text.
    pair_start: Count = 0
    # Whoever computes the prompt may pull this part of it instead, and computes it after all if that fails.
    prefix: PrefixHint | None = None
    # Peers that may compute chunks of the prompt in turn with whoever has it, who computes it all if one of them
    # declines (docs/pipelined_prompts.md).
    helpers: tuple[PeerRef, ...] = ()


class Cancel(AttemptMessage, frozen=True, kw_only=True):
    """Ends these samples of a request; empty `sample_indices`: all of it. Valid in every state, answered by Cancelled,
    idempotent."""

    sample_indices: tuple[int, ...] = ()


class Cancelled(AttemptMessage, frozen=True, kw_only=True):
    """Answer to Cancel, for the same `sample_indices`: the node sends no more of them."""

    sample_indices: tuple[int, ...] = ()


class Accepted(AttemptMessage, frozen=True, kw_only=True):
    """Answer to Submit. From a decode node it is the ticket: hits pinned, demand counted, no new block taken."""

    num_cached_tokens: int = 0


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
    cumulative_logprob: float | None = None  # of the whole output, where beams were searched

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.attempt)


class Tokens(Message, frozen=True, kw_only=True):
    """All the tokens that one step made for one router process."""

    deltas: tuple[TokenDelta, ...]


class PromptLogprobs(AttemptMessage, frozen=True, kw_only=True):
    """One entry per prompt position from 1 on (position 0 has no prediction). Sent before the first TokenDelta."""

    entries: tuple[TokenLogprobs, ...]


class Pooled(AttemptMessage, frozen=True, kw_only=True):
    """The vector, or the score, that a pooling node makes of a prompt. It ends the request."""

    values: bytes  # float32 little-endian


class RequestFailed(AttemptMessage, frozen=True, kw_only=True):
    """The node gives this attempt up. `retryable`: another attempt may succeed (elsewhere or later)."""

    code: str
    message: str
    retryable: bool


class Migrate(AttemptMessage, frozen=True, kw_only=True):
    """Router -> node that decodes: hand this sample to `peer`, which has the Submit of the attempt `successor`. The
    prompt of that Submit is the first `num_tokens` tokens of prompt and output. Answered by Migrated when the move has
    succeeded or failed; until then the sample's tokens come from this node.
    """

    sample_index: int
    peer: PeerRef
    successor: AttemptKey
    num_tokens: Count
    deadline_s: Seconds


class Migrated(AttemptMessage, frozen=True, kw_only=True):
    """Answer to Migrate. `reason` "": the sample is the peer's, and this node sends no more of it. Any other reason:
    the sample goes on here, or has ended here."""

    sample_index: int
    successor: AttemptKey
    reason: str = ""


class FlushBlocks(Message, frozen=True, kw_only=True):
    """Administrative: drop every unused cached block (benchmarks and tests). Answered by Status."""
