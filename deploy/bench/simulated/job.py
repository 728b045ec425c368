"""A request on its way through simulated nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.simulated.cache import TieredCache
from tandem.deploy.bench.trace import TraceRequest
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.kv_connector.pulls.chunks import ChunkTable


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
    places: tuple[str, ...] = ()  # the nodes that compute it, the first of which has it
    table: ChunkTable | None = None  # whose turn it is, where they are several
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
    adapter: None = None

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
    def num_nodes(self) -> int:
        """How many compute it, chunk by chunk in turn."""
        return max(1, len(self.places))

    @property
    def num_own_tokens(self) -> int:
        """What is left for each of its nodes."""
        return -(-self.num_left // self.num_nodes)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_left

    @property
    def num_launched_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def is_only_computed(self) -> bool:
        return not self.decode_on and not self.has_help

    @property
    def has_help(self) -> bool:
        return self.num_nodes > 1

    @property
    def block_ids(self) -> tuple[str, ...]:
        """The blocks that a share has from the beginning, in short."""
        return self.places

    def is_had_by(self, node_id: str) -> bool:
        """Whether it is that node's prompt, and no other's with which it helps."""
        return not self.places or node_id == self.places[0]

    def is_over_at(self, node_id: str) -> bool:
        """Whether that node has nothing left to compute of it."""
        if self.table is None:
            return not self.num_left or (bool(self.places) and node_id not in self.places)
        last = self.table.of(self.places.index(node_id))[-1]
        return self.num_computed >= self.table.ends[last]

    def chunk_for(self, node_id: str) -> int:
        """How many tokens that node may compute now; 0: it is another's turn."""
        if self.table is None:
            return self.num_left if self.is_had_by(node_id) else 0
        index = self.table.chunk_at(self.num_computed)
        is_theirs = self.places[self.table.place_of(index)] == node_id
        return self.table.ends[index] - self.num_computed if is_theirs else 0

    def next_token_due(self, tpot_s: float, now: float) -> float:
        """When the next token should be there for `tpot_s` a token on average since the first."""
        num_made = self.request.num_output_tokens - (self.last_step - self.steps.num)
        return self.first_token_at + tpot_s * num_made
