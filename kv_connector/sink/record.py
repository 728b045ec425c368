"""A sink's record of one hand-off, beside its protocol state."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.blocks.reservations import Hold
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.parts import Continuation
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.sink_table import SinkState as S

ENDED = (S.COMMITTED, S.CLOSED, S.REJECTED)
OVER = (*ENDED, S.UNKNOWN)
# States in which the request has ended and its blocks wait for KVDrained or a fence, however long that takes: time
# alone never makes them safe.
UNTIL_SAFE = (S.QUARANTINED,)


@dataclass(eq=False, slots=True)
class SinkRecord:
    """One hand-off to this node: its protocol state, its blocks, what was last said. Times are monotonic seconds."""

    key: AttemptKey
    machine: SinkMachine
    deadline: float
    kind: HandoffKind = HandoffKind.PROMPT  # correct as soon as this node has asked for the hand-off
    source_id: str = ""
    request: Request | None = None
    expected_at: float = 0.0  # when the request was submitted
    num_tokens: int = 0  # in the pool at the commit: of a sequence at most so many, of a pull known from its claim on
    num_blocks: int = 0
    num_claimed: int = 0  # tokens that the claim names
    first_kept: int = 0  # the first token that its source still has, by its claim
    most_blocks: int = 0  # how many blocks a pull asked for
    pulled_from: int = 0  # which block of a prompt is the first of them
    is_used_early: bool = False  # steps may read its blocks while they are written
    into: list[int] = field(default_factory=list)  # the blocks that will be granted, where a request has them already
    is_held: bool = False  # its claim is not granted yet
    queued_at: float = 0.0  # since when it waits in line, and its place there: (priority, number of the claim)
    place: tuple[int, int] = (0, 0)
    num_passed: int = 0  # leading blocks that are before every window of what is handed over: nobody sends or has them
    first_window: int = 0  # the first block that comes with its window blocks, where blocks have such
    hits: list[int] = field(default_factory=list)  # behind them
    hold: Hold | None = None  # the reservation of the hits, while they belong to a ticket
    granted: list[int] = field(default_factory=list)
    grant: KVGrant | None = None
    lease_until: float = 0.0
    quarantined_at: float = 0.0
    was_warned: bool = False  # whether the log says already that the quarantine lasts
    ready: KVReady | None = None
    bad_indices: tuple[int, ...] = ()
    reason: str = ""
    resend_at: float = 0.0
    resend_every_s: float = 0.0
    closed_at: float = 0.0

    @property
    def source(self) -> NodeKey:
        return NodeKey(self.source_id, self.machine.source_epoch)

    @property
    def first_block(self) -> int:
        """The first block that the source is to write."""
        return self.num_passed + len(self.hits)

    @property
    def num_found(self) -> int:
        """How many leading blocks of the prompt were found here."""
        return self.first_block if self.hits else 0

    def because(self, reason: str) -> None:
        """Notes why the hand-off ends, if it has not ended yet."""
        if self.machine.state not in (*ENDED, *UNTIL_SAFE):
            self.reason = reason

    def fits(self, continuation: Continuation | None, block_size: int) -> bool:
        """Whether it is the end of this running sequence, and what was granted has room for just the rest."""
        if continuation is None or self.request is None:
            return True
        num_tokens = self.request.num_prompt_tokens + len(continuation.token_ids) - 1
        starts_at = self.first_block * block_size
        return continuation.num_tokens == num_tokens and starts_at < num_tokens <= self.num_tokens
