"""A request on a node: what is asked for, and how far it has come. The scheduler alone changes that."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tandem.engine.contracts.hashing import EVERYBODYS, Secrecy
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import (
    NO_TARGETS,
    AdapterRef,
    Candidates,
    FinishReason,
    FirstToken,
    Targets,
    TokenLogprobs,
)
from tandem.engine.scheduling.beams.search import BeamSearch


class RequestState(enum.Enum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"  # no slot; no blocks, or those of a committed hand-off
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks, waits to recompute (after its tokens in flight have landed)
    FINISHED = "finished"


FIRST_OF_ALL = -(1 << 32)  # below what a request may ask for


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What is asked for. All sequences that answer it share this one, whether they fork, start over or go on here."""

    key: AttemptKey
    token_ids: np.ndarray  # int32 [num_prompt_tokens], prior output at its tail
    sampling: SamplingParams
    num_prior_output_tokens: int = 0
    priority: int = 0
    targets: Targets = NO_TARGETS
    waited_s: float = 0.0  # until it came here
    arrival: int = 0  # a counter: order within one priority
    mode: str = "full"  # as in Submit
    use_prefix_cache: bool = True
    secrecy: Secrecy = EVERYBODYS
    media: tuple[MediaItem, ...] = ()  # of the spans of `token_ids` that are below 0
    adapter: AdapterRef | None = None
    adapter_weights: object = None  # what keeps the adapter in memory as long as the prompt is known here

    @property
    def num_true_tokens(self) -> int:
        """Tokens before the request's very first output."""
        return len(self.token_ids) - self.num_prior_output_tokens


@dataclass(eq=False, slots=True)
class Request:
    """One sequence, or, until its prompt is computed, a group of `len(sample_indices)` samples that will fork. Where
    beams are searched each beam has a sequence, whose samples are the search's.

    Invariants: `num_computed_tokens` counts tokens whose KV is written or will be by a launched step;
    `num_tokens` counts tokens known to the host; `num_in_flight` counts sampled tokens launched and not yet read.
    """

    prompt: Prompt
    sample_indices: tuple[int, ...] = (0,)
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of known tokens

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)  # tokens of this attempt
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first start
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    adapter_slot: int = 0  # while it runs: where its adapter is; 0: it has none
    # Filled when a prompt in mode "prefill" ends, in order of sample_indices.
    first_tokens: list[FirstToken] = field(default_factory=list)

    targets: Targets = NO_TARGETS  # what it is promised, by itself or by the node; set by the scheduler
    order: int = 0  # given by the scheduler, unique: the last word on who runs first
    max_num_tokens: int = 0  # prompt and output together; set by the scheduler from max_tokens and max_model_len
    # Newest step that works for this request and so may write its blocks, -1: none. Whoever gets the blocks in
    # `request_finished` gives it to `BlockPool.free`.
    last_step: int = -1
    num_registered_blocks: int = 0  # leading blocks offered to the hash table
    num_table_blocks: int = 0  # leading blocks that the slot's block table on the device has
    num_passed_blocks: int = 0  # leading blocks given back since no row reads them any more: the null block's places
    num_table_passed: int = 0  # of them, those of which the slot's block table knows
    newest_row_start: int = 0  # where its newest row began: no row to come begins before
    keeps_blocks: bool = False  # gives none back before its end: others count on them
    first_token_at: float = 0.0  # seconds of the scheduler's clock; 0.0: not yet
    num_preemptions: int = 0
    num_yields: int = 0  # how many of these preemptions were for a request that waited
    waiting_since: float = 0.0
    is_aged: bool = False  # has waited so long that it goes before all others
    is_paused: bool = False  # keeps its slot and blocks and gets no rows: its KV is being handed to another node
    # Some of its KV came from a peer and is not verified yet: nobody else may find its blocks, its tokens are withheld.
    is_doubtful: bool = False
    num_verified_tokens: int = 0  # of a prompt that others stopped computing, too: what lies before is right
    num_nodes: int = 1  # that compute its prompt: with others, who do so in its blocks or for it, it keeps them all
    leaves_nothing: bool = False  # nobody finds its blocks: the node whose prompt it is keeps them
    was_started: bool = False
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by prompt position, until complete
    prompt_logprobs_sent: bool = False

    beams: BeamSearch | None = None  # shared by all sequences of its request
    beam_index: int = 0  # which of its beams this sequence carries
    candidates: Candidates | None = None  # what may follow it: it waits for its siblings'
    drawn_token_id: int = -1  # what the device drew behind it, beside the candidates
    has_stale_slot: bool = False  # its newest token is not what the device drew

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt.token_ids)

    def pause(self) -> None:
        self.is_paused = True

    def keep_blocks(self) -> None:
        self.keeps_blocks = True

    def resume(self) -> None:
        self.is_paused = self.keeps_blocks = False

    def get_help(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def help(self, num_nodes: int) -> None:
        """Makes it a share of a prompt that another node has."""
        self.num_nodes, self.leaves_nothing = num_nodes, True

    def go_alone(self, num_verified_tokens: int = 0) -> None:
        """Ends the work of other nodes, of which what lies before so many tokens is right, as is its own there."""
        self.num_nodes, self.num_verified_tokens = 1, num_verified_tokens

    @property
    def has_help(self) -> bool:
        return self.num_nodes > 1

    def doubt(self) -> None:
        self.is_doubtful = True

    def trust(self) -> None:
        self.is_doubtful = False

    # --- where it carries a beam ----------------------------------------------------------------------------

    def wait_for_siblings(self, candidates: Candidates, drawn_token_id: int) -> None:
        """Takes what may follow its beam. `drawn_token_id` is what its slot on the device has next; -1: nothing."""
        self.candidates, self.drawn_token_id = candidates, drawn_token_id

    def go_on_with(self, token_id: int, beam_index: int) -> None:
        """Carries a beam that follows the one before by this token."""
        self.has_stale_slot = token_id != self.drawn_token_id
        self.output_token_ids.append(token_id)
        self.beam_index, self.candidates = beam_index, None

    def begin_behind(self, parent: Request, token_id: int, beam_index: int, num_computed_tokens: int) -> None:
        """Carries a beam that follows the parent's by this token. `num_computed_tokens` of its tokens are computed."""
        self.output_token_ids = [*parent.output_token_ids, token_id]
        self.beam_index, self.is_aged, self.num_computed_tokens = beam_index, parent.is_aged, num_computed_tokens

    @property
    def key(self) -> AttemptKey:
        return self.prompt.key

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Lower runs first and is preempted last."""
        return self.priority, self.prompt.arrival, self.order

    @property
    def priority(self) -> int:
        """Lower goes first."""
        return FIRST_OF_ALL if self.is_aged else self.prompt.priority

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_launched_tokens(self) -> int:
        """Tokens that the device has once the launched steps have run."""
        # `num_tokens` and those in flight; of every stream in every step several ask, so it is one call.
        return self.num_prompt_tokens + len(self.output_token_ids) + self.num_in_flight

    @property
    def is_only_computed(self) -> bool:
        """Whether nothing else happens with its prompt: nothing is pushed, encoded, or told of its tokens."""
        asked = self.prompt
        return asked.mode != "prefill" and not asked.media and asked.sampling.num_prompt_logprobs is None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Launched tokens whose KV no launched step writes."""
        return self.num_launched_tokens - self.num_computed_tokens

    @property
    def num_own_tokens(self) -> int:
        """About how many of these this node computes."""
        return -(-self.num_uncomputed_tokens // self.num_nodes)

    def next_token_due(self, tpot_s: float, now: float) -> float:
        """When the next token to be launched should be there for `tpot_s` a token on average since the first."""
        return (self.first_token_at or now) + tpot_s * (self.num_launched_tokens - self.num_prompt_tokens)

    @property
    def can_advance(self) -> bool:
        """Whether a row launched now may yield something that is kept: max_tokens is predicted, a stop is not. What
        follows a beam is known when all are read."""
        if self.beams is not None and (self.num_in_flight or self.candidates is not None):
            return False
        if self.is_paused or (self.prompt.mode == "prefill" and self.num_launched_tokens > self.num_prompt_tokens):
            return False
        return self.num_launched_tokens < self.max_num_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.prompt.sampling.num_prompt_logprobs is not None and not self.prompt_logprobs_sent

    def known_token_ids(self, start: int = 0) -> np.ndarray:
        """int32 [num_tokens - start]: prompt and output from position `start` on, as far as the host knows them."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return np.array(self.output_token_ids[start - num_prompt :], np.int32)
        if not self.output_token_ids:
            return self.prompt.token_ids[start:]
        return np.concatenate((self.prompt.token_ids[start:], np.array(self.output_token_ids, np.int32)))

    def check_integrity(self, num_computed_blocks: int) -> None:
        """Raises AssertionError when a queued request whose computed tokens take so many blocks contradicts itself."""
        running = self.state is RequestState.RUNNING
        assert running == (self.slot >= 0)
        assert self.state is not RequestState.FINISHED, "a finished request is queued"
        assert self.sample_indices
        assert self.num_in_flight >= 0, "num_in_flight is negative"
        assert running or self.num_computed_tokens == 0 or self.block_ids, "computed tokens without blocks"
        assert self.state is not RequestState.PREEMPTED or not self.block_ids, "a preempted request has blocks"
        assert self.num_computed_tokens <= self.num_launched_tokens
        assert len(self.block_ids) >= num_computed_blocks, "KV without a block"


# --- what the scheduler reports after a step ----------------------------------------------------------------


class TokensEvent(msgspec.Struct, frozen=True, gc=False):
    """The new tokens of one sample that one step made, one or more. `output_index` of the first of them counts from the
    request's very first output (prior attempts too)."""

    request: Request
    sample_index: int
    output_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # it is the last of `token_ids`
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """A sample that a beam search found; an empty one: there are fewer outputs than samples."""

    sample_index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    sum_logprobs: float | None = None


@dataclass(frozen=True, slots=True)
class BeamsEvent:
    """All samples of a request that searched with beams. It is the request's end."""

    request: Request
    outputs: tuple[BeamOutput, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """The log-probabilities of a whole prompt, one entry for each position from 1 on."""

    request: Request
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PooledEvent:
    """What a model that pools made of the whole prompt: float32 little-endian. It is the request's end."""

    request: Request
    values: bytes


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The engine gives the request up, e.g. it can't fit into the pool even alone."""

    request: Request
    code: str
    message: str
    retryable: bool


EngineEvent = TokensEvent | BeamsEvent | PromptLogprobsEvent | PooledEvent | FailedEvent
