"""What a request machine is made of: its states, one attempt of a sub-request, the output of one sample."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.engine.contracts.errors import (
    DeadlineError,
    InvalidRequestError,
    NodeFailedError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.parts import HELP_LOST, KV_OVERFLOW, FinishReason
from tandem.engine.contracts.wire.requests import TokenDelta


class AttemptState(enum.Enum):
    """States of an attempt, in order of progress."""

    QUEUED = 0
    PLACED = 1
    PREFILLING = 2
    STREAMING = 3
    FINISHED = 4
    FAILED = 5


@dataclass(slots=True)
class Attempt:
    """One try of one sub-request. `primary` makes the tokens; `prefill` hands its KV over to it, if set."""

    request_id: str
    number: int
    sample_indices: tuple[int, ...]
    entered_at: float
    state: AttemptState = AttemptState.QUEUED
    primary: NodeKey | None = None
    prefill: NodeKey | None = None
    awaiting: set[NodeKey] = field(default_factory=set)  # nodes that have not answered Submit
    primary_streams: bool = False  # it has sent tokens: whoever computed the prompt owes none
    num_failures: int = 0  # how many attempts before it failed
    num_prior: int = 0  # output tokens that its prompt contains
    not_before: float = 0.0
    waits_since: float = field(init=False)  # when it began to wait for nodes
    was_turned_away: bool = False  # a node was full or draining: the attempt did not fail, the node is not avoided
    avoid: set[NodeKey] = field(default_factory=set)  # nodes that failed earlier attempts
    is_precise: bool = False  # an attempt before overflowed a node's fp8 KV: this one needs KV of 16 bits
    has_overflowed: bool = False  # so did this one: it did not fail, the node is not avoided
    goes_alone: bool = False  # an attempt before lost others' help with its prompt: this one gets none
    has_lost_help: bool = False  # so did this one: the node keeps what was verified, and is not avoided
    error: TandemError | None = None  # why the attempt before failed

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.request_id, self.number)

    @property
    def nodes(self) -> list[NodeKey]:
        return [node for node in (self.primary, self.prefill) if node is not None]

    def __post_init__(self) -> None:
        self.waits_since = self.entered_at

    def enter(self, state: AttemptState, now: float) -> None:
        assert state.value > self.state.value, f"{self.state} -> {state}"
        self.state, self.entered_at = state, now

    def failed_with(self, code: str) -> None:
        """Notes what a node says. Once it makes tokens, what turns it away is an answer to a Submit that was sent
        twice: an end like any other."""
        self.was_turned_away = code in TAKES_NOTHING and self.state is not AttemptState.STREAMING
        self.has_overflowed = code == KV_OVERFLOW and not self.is_precise
        self.has_lost_help = code == HELP_LOST

    def next(
        self,
        request_id: str,
        number: int,
        sample_indices: tuple[int, ...],
        culprits: Iterable[NodeKey],
        error: TandemError,
        now: float,
        backoff_s: float,
    ) -> Attempt:
        is_free = self.was_turned_away or self.has_overflowed
        following = Attempt(
            request_id,
            number,
            sample_indices,
            now,
            num_failures=self.num_failures + (not is_free),
            not_before=now + backoff_s,
            avoid=self.avoid if is_free or self.has_lost_help else self.avoid | set(culprits),
            is_precise=self.is_precise or self.has_overflowed,
            goes_alone=self.goes_alone or self.has_lost_help,
            error=error,
        )
        if self.was_turned_away:
            following.waits_since = self.waits_since
        return following

    def is_last(self, max_attempts: int, full_s: float, now: float) -> bool:
        """Whether no attempt may follow this one, which failed. Being turned away costs time, `full_s` at most, and no
        attempt, and so does, once, the change to precise KV."""
        if self.has_overflowed:
            return False
        if self.was_turned_away:
            return now - self.waits_since >= full_s
        return self.num_failures + 1 >= max_attempts

    def with_history(self, error: TandemError) -> TandemError:
        """The error that ended the attempt. If others failed before it, the text says how many and how the last did."""
        if self.num_failures and self.error is not None:
            error.add(f" (failure {self.num_failures + 1} of the request; before: {self.error.message})")
        return error

    def check_integrity(self) -> None:
        assert self.state.value <= AttemptState.STREAMING.value
        assert (self.primary is None) == (self.state is AttemptState.QUEUED), "placed means: has a node"
        assert self.awaiting <= set(self.nodes)


@dataclass(slots=True)
class Sample:
    """Output of one sample. `token_ids` were emitted; `pending` came early and waits, since `waits_since`, for the
    tokens before it."""

    token_ids: list[int] = field(default_factory=list)
    pending: dict[int, TokenDelta] = field(default_factory=dict)
    waits_since: float = 0.0  # monotonic seconds
    finish_reason: FinishReason | None = None

    def take(self, delta: TokenDelta, max_tokens: int, now: float) -> list[TokenDelta]:
        """Puts `delta` in its place; returns what can be emitted now, in order, cut free of duplicates."""
        if self.finish_reason is not None:
            return []
        if not self.pending:
            self.waits_since = now
        if delta.output_index > len(self.token_ids):
            known = self.pending.get(delta.output_index)
            if delta.output_index < max_tokens and (known is None or len(known.token_ids) < len(delta.token_ids)):
                self.pending[delta.output_index] = delta
            return []
        ready = self._append(delta, max_tokens)
        while self.pending and self.finish_reason is None:
            early = min(self.pending)
            if early > len(self.token_ids):
                break
            ready += self._append(self.pending.pop(early), max_tokens)
        return ready

    def _append(self, delta: TokenDelta, max_tokens: int) -> list[TokenDelta]:
        num_known = len(self.token_ids) - delta.output_index
        if num_known > len(delta.token_ids):
            return []
        room = max_tokens - len(self.token_ids)
        if num_known or len(delta.token_ids) > room:
            delta = _cut(delta, num_known, num_known + room)
        if not delta.token_ids and delta.finish_reason is None:
            return []
        self.token_ids += delta.token_ids
        if delta.finish_reason is None and len(self.token_ids) >= max_tokens:
            delta = msgspec.structs.replace(delta, finish_reason="length")
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason)
        return [delta]

    def is_contradicted_by(self, delta: TokenDelta) -> bool:
        """Whether `delta` repeats tokens that were emitted, and not the same. An ended sample takes no more."""
        if self.finish_reason is not None:
            return False
        known = self.token_ids[delta.output_index : delta.output_index + len(delta.token_ids)]
        return tuple(known) != delta.token_ids[: len(known)]

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.pending.clear()


def _cut(delta: TokenDelta, start: int, end: int) -> TokenDelta:
    overshoot = end < len(delta.token_ids)
    return msgspec.structs.replace(
        delta,
        output_index=delta.output_index + start,
        token_ids=delta.token_ids[start:end],
        logprobs=None if delta.logprobs is None else delta.logprobs[start:end],
        finish_reason=None if overshoot else delta.finish_reason,
        stop_token_id=None if overshoot else delta.stop_token_id,
    )


PEER_LOST = "peer_lost"  # code of a node that has lost the other one of its attempt
# Codes of a node that is full or drains: nothing was lost, and the request waits until one takes it.
TAKES_NOTHING = frozenset({"overloaded", "draining"})
_ERRORS_BY_CODE: dict[str, type[TandemError]] = {
    "overloaded": OverloadedError,
    "unavailable": UnavailableError,
    "draining": UnavailableError,
    "deadline_exceeded": DeadlineError,
    "invalid_request": InvalidRequestError,
    "too_large_for_pool": InvalidRequestError,  # more KV than the node has in all: no retry can help
}


def failure_of(code: str, message: str, request_id: str) -> TandemError:
    """The error that a node's RequestFailed becomes when no attempt is left."""
    return _ERRORS_BY_CODE.get(code, NodeFailedError)(message, request_id=request_id)
