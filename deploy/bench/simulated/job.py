"""A request on its way through simulated nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.simulated.cache import TieredCache
from tandem.deploy.bench.trace import TraceRequest
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets


@dataclass(slots=True)
class StepCount:
    """How many steps a node has made."""

    num: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A request. Times are virtual. It has what orders and budgets ask of a scheduler's request."""

    request: TraceRequest
    hashes: Sequence[bytes]
    arrived_at: float
    decode_on: str = ""  # the node that its KV is handed over to; "": it decodes where its prompt is computed
    peer: TieredCache | None = None  # of the node that the router names to pull the prompt's prefix from
    num_nodes: int = 1  # that take its chunks in turn
    num_computed: int = 0
    loading_s: float = 0.0  # what its first node spends on what it found
    num_found: int = 0  # tokens that were cached
    chunk_ends_at: float = 0.0  # its newest chunk
    num_held: int = 0  # tokens that the node which decodes has of the prompt
    has_claimed: bool = False  # room at that node
    is_granted: bool = False
    computed_at: float = 0.0  # when its prompt was, to be handed over; 0.0: it isn't yet
    hits: dict[str, int] = field(default_factory=dict)  # tokens by tier
    first_token_at: float = 0.0
    finished_at: float = 0.0
    steps: StepCount = field(default_factory=StepCount)  # of the node where it decodes
    last_step: int = 0  # the one there that makes its last token
    targets: Targets = NO_TARGETS
    waited_s: float = 0.0
    priority: int = 0
    order: int = 0

    @property
    def prompt(self) -> Job:
        return self

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        return self.request.num_prompt_tokens - self.num_computed

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left for each of its nodes."""
        return -(-self.num_left // self.num_nodes)

    def next_token_due(self, tpot_s: float, now: float) -> float:
        """When the next token should be there for `tpot_s` a token on average since the first."""
        num_made = self.request.num_output_tokens - (self.last_step - self.steps.num)
        return self.first_token_at + tpot_s * num_made
