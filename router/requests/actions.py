"""What a request machine is asked for and what it answers: the specification of a request, and its actions."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.hashing import EVERYBODYS, Secrecy
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import NO_TARGETS, AdapterRef, FinishReason, Targets, TokenLogprobs
from tandem.engine.contracts.wire.requests import Cancel, Migrate, Submit


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What one request asks for. It never changes. Durations are in seconds."""

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    num_samples: int = 1
    priority: int = 0
    targets: Targets = NO_TARGETS
    use_prefix_cache: bool = True
    pair_start: int = 0  # of a pair's second text among the prompt's tokens
    secrecy: Secrecy = EVERYBODYS
    cache_share: float = 1.0
    adapter: AdapterRef | None = None
    media: tuple[MediaItem, ...] = ()
    session: str = ""  # requests of one session go to the same nodes
    max_attempts: int = 3
    deadline_s: float = 600.0
    queue_s: float = 10.0  # longest wait while no node is there that could take it
    accept_s: float = 10.0  # longest wait for nodes' answers to Submit, and for room on full ones

    @property
    def most_tokens(self) -> int:
        """Tokens that each sample may have in the end, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Place:
    """The order to find nodes for this sub-request and then to call `placed`. When there are none, or it must not be
    placed yet, the sub-request waits and the machine asks again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send this message to that node."""

    node: NodeKey
    message: Submit | Cancel | Migrate


@dataclass(frozen=True, slots=True)
class EmitPromptLogprobs:
    """Give the prompt's log probabilities to the listener, one entry a position from 1 on."""

    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class EmitPooled:
    """The order to pass on a prompt's vector, or its score: float32 little-endian."""

    values: bytes


class EmitTokens(msgspec.Struct, frozen=True):
    """The next tokens of a sample, in order and without gaps."""

    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_token_id: int | None
    cumulative_logprob: float | None = None  # of a whole output that beams found


@dataclass(frozen=True, slots=True)
class Moved:
    """The next tokens of this sample come from another node than those before."""

    sample_index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the generation: every sample has its end."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the generation with this error."""

    error: TandemError


Action = Place | SendToNode | EmitPromptLogprobs | EmitPooled | EmitTokens | Moved | Finish | Fail
