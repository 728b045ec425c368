"""The life of one request across nodes as a pure object: events in, actions out, time passed in.

    QUEUED ──placed──> PLACED ──accepted──> PREFILLING ──first token──> STREAMING ──last token──> FINISHED
       ^  └ queue_s: 503,  │ accept_s: retry     │ deadline_s: 504         │ deadline_s: 504          FAILED
       │    429 if full    │ full: waits again   │                         │
       └───────────── attempt failed, attempts left ─┴─────────────────────────┘

The machine owns the output: per sample it orders token deltas by output_index, drops duplicates and everything of an
older attempt, and alone starts the next attempt, whose prompt is the prompt plus the tokens already emitted. One
sub-request serves all samples until an attempt fails after tokens were emitted; from then on each unfinished sample
continues in a sub-request of its own. The request ends exactly once, by `Finish` or `Fail`.
"""

from __future__ import annotations

import msgspec

from tandem.engine.contracts.errors import DeadlineError, NodeFailedError, NoNodeError, TandemError
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancelled,
    Migrated,
    PromptLogprobs,
    RequestFailed,
    TokenDelta,
)
from tandem.router.placing.placement import Placement
from tandem.router.placing.view import NodeKey, node_key
from tandem.router.requests.actions import Action, EmitPromptLogprobs, EmitTokens, Place, Send
from tandem.router.requests.moves import RequestMoves, contradicts
from tandem.router.requests.parts import PEER_LOST, TAKES_NOTHING, Attempt, AttemptState, failure_of


class RequestMachine(RequestMoves):
    """See the module's docstring. Every method here takes an event and returns the actions to carry out, in order."""

    def start(self) -> list[Action]:
        return [Place(request_id) for request_id in self.waiting()]

    def placed(self, request_id: str, placement: Placement, now: float) -> list[Action]:
        """Nodes were found."""
        attempt = self.live.get(request_id)
        if attempt is None or attempt.state is not AttemptState.QUEUED:
            return []
        attempt.enter(AttemptState.PLACED, now)
        attempt.primary = node_key(placement.primary)
        attempt.prefill = node_key(placement.prefill) if placement.prefill else None
        attempt.awaiting, attempt.num_prior = set(attempt.nodes), len(self._seen(attempt))
        self.placed_at = self.placed_at if self.placed_at is not None else now
        base = self._submit(attempt, now)
        computes = msgspec.structs.replace(base, prefix=placement.prefix) if placement.prefix is not None else base
        if placement.prefill is None:
            return [Send(attempt.primary, computes)]
        assert attempt.prefill is not None
        decode = msgspec.structs.replace(base, mode="decode", peer=placement.prefill)
        prefill = msgspec.structs.replace(computes, mode="prefill", peer=placement.primary)
        return [Send(attempt.primary, decode), Send(attempt.prefill, prefill)]

    def answered(
        self, node: NodeKey, message: Accepted | PromptLogprobs | RequestFailed | Cancelled | Migrated, now: float
    ) -> list[Action]:
        """Whatever a node says about this request besides tokens."""
        if isinstance(message, Accepted):
            return self.accepted(node, message, now)
        if isinstance(message, PromptLogprobs):
            return self.prompt_logprobs(node, message)
        if isinstance(message, RequestFailed):
            return self.request_failed(node, message, now)
        if isinstance(message, Migrated):
            return self.migrated(node, message, now)
        return self.cancelled(node, message)

    def accepted(self, node: NodeKey, message: Accepted, now: float) -> list[Action]:
        attempt = self._current(node, message.request_id, message.attempt)
        if attempt is None:
            return []
        attempt.awaiting.discard(node)
        self._note_cached(attempt, node, message.num_cached_tokens)
        if not attempt.awaiting and attempt.state is AttemptState.PLACED:
            attempt.enter(AttemptState.PREFILLING, now)
        return []

    def prompt_logprobs(self, node: NodeKey, message: PromptLogprobs) -> list[Action]:
        attempt = self._current(node, message.request_id, message.attempt)
        if attempt is None or not self.wants_prompt_logprobs():
            return []
        self.has_prompt_logprobs = True
        return [EmitPromptLogprobs(message.entries)]

    def tokens(self, node: NodeKey, delta: TokenDelta, now: float) -> list[Action]:
        attempt = self._current(node, delta.request_id, delta.attempt)
        moved: list[Action] = []
        if attempt is None and self.moves:
            attempt, moved = self._arrived(node, delta, now)
        if attempt is None or delta.sample_index not in attempt.sample_indices:
            self.num_dropped_deltas += 1
            return []
        sample = self.samples[delta.sample_index]
        attempt.awaiting.discard(node)
        attempt.handed_off |= node == attempt.primary
        if delta.num_cached_tokens:
            self._note_cached(attempt, node, delta.num_cached_tokens)
        if sample.finish_reason is None and contradicts(sample, delta):
            error = NodeFailedError("two nodes made different tokens", request_id=self.spec.request_id)
            return moved + self._attempt_failed(attempt, {node}, set(), error, True, now)
        ready = sample.take(delta, self.spec.sampling.max_tokens)
        if not ready:
            self.num_dropped_deltas += sample.finish_reason is not None or delta.output_index < len(sample.token_ids)
            return moved
        if attempt.state is not AttemptState.STREAMING:
            attempt.enter(AttemptState.STREAMING, now)
        actions = moved
        for d in ready:
            actions.append(EmitTokens(delta.sample_index, d.token_ids, d.logprobs, d.finish_reason, d.stop_token_id))
        return actions + self._retire(attempt) if sample.finish_reason is not None else actions

    def stop_sample(self, sample_index: int) -> list[Action]:
        """The text of a sample contains a stop string: it is complete; the nodes must not go on."""
        sample = self.samples[sample_index]
        if self.outcome is not None or sample.finish_reason is not None:
            return []
        sample.finish("stop")
        attempt = next(a for a in self.live.values() if sample_index in a.sample_indices)
        unfinished = self._unfinished(attempt)
        actions = self._cancel(attempt, attempt.nodes, (sample_index,) if unfinished else ())
        return actions + self._retire(attempt)

    def request_failed(self, node: NodeKey, message: RequestFailed, now: float) -> list[Action]:
        attempt = self._current(node, message.request_id, message.attempt)
        if attempt is None:
            self._successor_failed(node, message.request_id, message.attempt, now)
            return []
        error = failure_of(message.code, message.message, self.spec.request_id)
        # Once it makes tokens, what turns it away is an answer to a Submit that was sent twice: an end like any other.
        attempt.was_turned_away = message.code in TAKES_NOTHING and attempt.state is not AttemptState.STREAMING
        culprits = {node} if message.code != PEER_LOST else set(attempt.nodes) - {node}
        return self._node_gave_up(attempt, node, culprits, error, message.retryable, now)

    def node_lost(self, node: NodeKey, reason: str, now: float) -> list[Action]:
        """Nothing more comes from this epoch of the node; cancels aimed at it need no answer."""
        self.pending_cancels = {cancel for cancel in self.pending_cancels if cancel[0] != node}
        self._successors_lost(node, now)
        actions: list[Action] = []
        for attempt in [a for a in self.live.values() if node in a.nodes]:
            if attempt.request_id in self.live:
                error = NodeFailedError(f"node {node[0]} was lost: {reason}", request_id=self.spec.request_id)
                actions += self._node_gave_up(attempt, node, {node}, error, True, now)
        return actions

    def cancelled(self, node: NodeKey, message: Cancelled) -> list[Action]:
        if not message.sample_indices:
            self.pending_cancels.discard((node, message.request_id, message.attempt))
        return []

    def abort(self, error: TandemError) -> list[Action]:
        """Ends the request with `error` from outside, in any state; does nothing after the end."""
        return [] if self.outcome is not None else self._fail(error)

    def tick(self, now: float) -> list[Action]:
        """Judges the deadlines; called a few times a second."""
        if self.outcome is not None:
            return []
        if now >= self.deadline:
            limit = f"{self.spec.deadline_s:g} s"
            error = DeadlineError(f"the request did not end within {limit}", request_id=self.spec.request_id)
            return self._fail(error)
        actions = self._overdue_moves(now)
        for attempt in list(self.live.values()):
            if attempt.request_id in self.live:
                actions += self._tick_attempt(attempt, now)
        return actions

    def _tick_attempt(self, attempt: Attempt, now: float) -> list[Action]:
        in_state_s = now - attempt.entered_at
        if attempt.state is AttemptState.QUEUED:
            if now - attempt.waits_since >= self.spec.queue_s:
                message = f"no node could take the request within {self.spec.queue_s:g} s"
                if attempt.error is None:
                    return self._fail(NoNodeError(message, request_id=self.spec.request_id))
                attempt.error.message += f"; since then {message}"
                return self._fail(attempt.error)
            return [Place(attempt.request_id)] if now >= attempt.not_before else []
        if attempt.state is AttemptState.PLACED and in_state_s >= self.spec.accept_s:
            names = ", ".join(sorted(node[0] for node in attempt.awaiting))
            message = f"no answer from {names} within {self.spec.accept_s:g} s"
            return self._attempt_failed(
                attempt, attempt.awaiting, set(), NodeFailedError(message, request_id=self.spec.request_id), True, now
            )
        return []
