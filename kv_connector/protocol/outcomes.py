"""How a hand-off ends, as the managers tell the node's main. Every hand-off that was expected ends in exactly one of
these, or in the caller's own cancel, which needs no report."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire import parts
from tandem.engine.contracts.wire.parts import Continuation, FirstToken
from tandem.engine.scheduling.request import Request

# Reasons, also on the wire in KVRefused and KVRelease.
CANCELLED = "cancelled"
DEADLINE = "deadline passed"
LEASE = "lease of the grant ran out"
SOURCE_LOST = "source lost"
SINK_LOST = "sink lost"
SINK_REFUSED = "the sink is refused"  # followed by the reason
FINISHED = "every sample ended with its first token"
RECOMPUTING = "the sink computes the prompt itself"
UNKNOWN = "no such hand-off"
EARLY = "the request did not come in time"
KV_OVERFLOW = "its keys or values are too large for the sink's KV in fp8: it needs KV of 16 bits (--precise-kv-tokens)"
TOO_LARGE = "the prompt does not fit into the pool"

NOT_CACHED = "nothing of it is cached"
NO_ROOM = "no room for what is pulled"
BUSY = "busy with other pulls"
NOT_DECODING = "it does not decode here now"
PREEMPTED = "preempted meanwhile"
OUTGROWN = "it grew faster than it was pushed"
ENDED = "it has ended"
OTHER_LAYOUT = "the blocks of the two nodes are laid out differently"

# Reasons for which another attempt would fail too. A cancel is none: whoever cancels tells the router why, unless it
# was the router, and that word must win over this node's, which may come first.
_FINAL = frozenset({DEADLINE, TOO_LARGE})


def is_retryable(reason: str) -> bool:
    return reason not in _FINAL


def failure_code(reason: str) -> str:
    """The `code` of the RequestFailed that reports this end. "peer_lost" lays the fault on the other node."""
    if reason == DEADLINE:
        return "deadline_exceeded"
    if reason == KV_OVERFLOW:
        return parts.KV_OVERFLOW
    is_the_peers = reason in (SOURCE_LOST, SINK_LOST, LEASE) or reason.startswith(SINK_REFUSED)
    return "peer_lost" if is_the_peers else "handoff_failed"


# --- source --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandoffCompleted:
    """Success: the sink goes on with the request, or nothing is left of it. The router needs no report."""

    key: AttemptKey
    reason: str  # "" (committed), RECOMPUTING or FINISHED


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """Failure: this node reports RequestFailed, and aborts the request if the scheduler still has it."""

    key: AttemptKey
    reason: str
    retryable: bool


SourceOutcome = HandoffCompleted | HandoffFailed


# --- sink ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Commit:
    """The KV of the whole prompt is in `block_ids` (in order of position). The references to them pass to the receiver
    of this event; the first `num_cached_tokens` tokens were this node's own prefix hits."""

    request: Request
    block_ids: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    continuation: Continuation | None = None  # what a running sequence has in place of first tokens


@dataclass(frozen=True, slots=True)
class Recompute:
    """The received bytes stayed wrong, so this node must compute the prompt itself. The client has `first_tokens`
    already; sampling goes on behind them. No block is held."""

    request: Request
    first_tokens: tuple[FirstToken, ...]
    continuation: Continuation | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Failure at the sink: this node reports RequestFailed. The request holds no block."""

    request: Request
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Released:
    """The source gave the hand-off up and has told the router why, so this node forgets the request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Fetched:
    """Success of a pull: the blocks are in `block_ids`, in order of position. The references to them pass to the
    receiver of this event."""

    key: AttemptKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NotFetched:
    """Failure of a pull, which holds no block."""

    key: AttemptKey
    reason: str


SinkOutcome = Commit | Recompute | Failed | Released | Fetched | NotFetched
