"""A request on a node: tokens, progress, blocks. Plain state; the scheduler alone changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from tandem.engine.messages import FinishReason, TokenLogprobs
from tandem.engine.sampling_params import SamplingParams


class RequestState(enum.Enum):
    WAITING = "waiting"  # no slot, no blocks beyond pinned hits
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks, waits to recompute (after its tokens in flight have landed)
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence, or, until its prompt is computed, a group of `len(sample_indices)` samples that will fork.

    Invariant: `num_computed_tokens` counts tokens whose KV is written or will be by a launched step;
    `num_tokens` counts tokens known to the host; `num_in_flight` counts sampled tokens launched and not yet read.
    """

    request_id: str
    attempt: int
    prompt_token_ids: np.ndarray  # int32 [num_prompt_tokens], prior output at its tail
    sampling: SamplingParams
    sample_indices: tuple[int, ...] = (0,)
    num_prior_output_tokens: int = 0
    priority: int = 0
    arrival: int = 0  # a counter: order within one priority
    mode: str = "full"  # as in Submit
    use_prefix_cache: bool = True
    salt: bytes = b""
    owner: object = None  # whoever gets the tokens; opaque to the engine
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of known tokens

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)  # tokens of this attempt
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first start
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    last_step: int = -1  # newest step launched that may write its blocks
    num_registered_blocks: int = 0  # leading blocks offered to the hash table
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # collected until complete
    prompt_logprobs_sent: bool = False
    # Filled when a prompt in mode "prefill" ends: (sample_index, token_id, finished) in order of sample_indices.
    first_tokens: list[tuple[int, int, bool]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


# --- what the scheduler reports after a step ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of one sample. `output_index` counts from the request's very first output (prior attempts too)."""

    request: Request
    sample_index: int
    output_index: int
    token_id: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    request: Request
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The engine gives the request up, e.g. it can't fit into the pool even alone."""

    request: Request
    code: str
    message: str
    retryable: bool


EngineEvent = TokenEvent | PromptLogprobsEvent | FailedEvent
