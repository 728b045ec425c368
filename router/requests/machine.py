"""The life of one request across nodes as a pure object: events in, actions out, time passed in.

    QUEUED ──placed──> PLACED ──accepted──> PREFILLING ──first token──> STREAMING ──last token──> FINISHED
       ^  └ queue_s: 503,  │ accept_s: retry     │ deadline_s: 504         │ deadline_s: 504          FAILED
       │    429 if full    │ full: waits again   │                         │ tokens lost for accept_s: retry
       └───────────── attempt failed, attempts left ─┴─────────────────────────┘

Its parts: the samples' output (`parts.py`), the attempts that live (`attempts.py`), samples on the move (`moves.py`).
The machine owns the output: per sample it orders token deltas by output_index, drops duplicates and everything of an
older attempt, and alone starts the next attempt, whose prompt is the prompt plus the tokens already emitted. One
sub-request serves all samples until an attempt fails after tokens were emitted; from then on each unfinished sample
continues in a sub-request of its own. The request ends exactly once, by `Finish` or `Fail`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.errors import DeadlineError, NodeFailedError, NoNodeError, TandemError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancelled,
    Migrated,
    Pooled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
)
from tandem.router.placing.placement import Placement
from tandem.router.requests import submits
from tandem.router.requests.actions import (
    Action,
    EmitPooled,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    Place,
    RequestSpec,
)
from tandem.router.requests.attempts import LiveAttempts
from tandem.router.requests.moves import Moves
from tandem.router.requests.parts import PEER_LOST, Attempt, AttemptState, Sample, failure_of


class RequestMachine:
    """One request's life, as the module docstring tells it. Every event returns the actions to carry out, in order."""

    def __init__(self, spec: RequestSpec, now: float) -> None:
        self.spec = spec
        self.samples = [Sample() for _ in range(spec.num_samples)]
        self.attempts = LiveAttempts(spec.request_id, self.samples, now)
        self.moves = Moves(self.samples, self.attempts)
        self.outcome: Finish | Fail | None = None
        self.deadline = now + spec.deadline_s
        self.num_cached_tokens = 0
        self.num_dropped_deltas = 0
        self.streams_since: float | None = None  # when a node that makes the tokens first sent some
        self._has_prompt_logprobs = False

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> AttemptState:
        """The state of the whole request: its least advanced sub-request's."""
        if self.outcome is not None:
            return AttemptState.FINISHED if isinstance(self.outcome, Finish) else AttemptState.FAILED
        return min((attempt.state for attempt in self.attempts.live.values()), key=lambda state: state.value)

    @property
    def closed(self) -> bool:
        """Whether the request has ended, and every node that was told to cancel has answered or is gone."""
        return self.outcome is not None and not self.attempts.pending_cancels

    def prompt_of(self, request_id: str) -> npt.NDArray[np.int32]:
        """The prompt of the sub-request's next Submit: the client's, then what this sample has emitted."""
        return submits.continued_prompt(self.spec, self.attempts.seen(self.attempts.live[request_id]))

    def num_tokens_of(self, sample_index: int) -> int:
        return len(self.spec.prompt_token_ids) + len(self.samples[sample_index].token_ids)

    def work_on(self, node: NodeKey) -> set[AttemptKey]:
        """What this node may be working on."""
        return self.attempts.work_on(node) | self.moves.work_on(node)

    def wants_prompt_logprobs(self) -> bool:
        return self.spec.sampling.num_prompt_logprobs is not None and not self._has_prompt_logprobs

    # --- from the router --------------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        return [Place(request_id) for request_id in self.attempts.queued()]

    def placed(self, request_id: str, placement: Placement, now: float) -> list[Action]:
        """Takes the nodes that were found for a sub-request."""
        attempt = self.attempts.live.get(request_id)
        if attempt is None or attempt.state is not AttemptState.QUEUED:
            return []
        attempt.enter(AttemptState.PLACED, now)
        attempt.primary = placement.primary.key
        attempt.prefill = placement.prefill.key if placement.prefill else None
        attempt.awaiting, attempt.num_prior = set(attempt.nodes), len(self.attempts.seen(attempt))
        return submits.to_placed(self._submit(attempt, now), attempt, placement)

    def move(self, sample_index: int, source: PeerRef, target: PeerRef, now: float, within_s: float) -> list[Action]:
        """Begins to move a sample out of `moves.movable(source)` to `target`, within `within_s` seconds."""
        move = self.moves.begin(sample_index, source.key, target.key, now, within_s)
        base = self._submit(move.successor, now)
        return submits.to_moving(base, move, self.num_tokens_of(sample_index), source, target, within_s)

    def stop_sample(self, sample_index: int) -> list[Action]:
        """Ends a sample whose text contains a stop string: it is complete, and the nodes must not go on."""
        sample = self.samples[sample_index]
        if self.outcome is not None or sample.finish_reason is not None:
            return []
        sample.finish("stop")
        attempt = self.attempts.of_sample(sample_index)
        unfinished = self.attempts.unfinished(attempt)
        actions = self.attempts.cancel(attempt, attempt.nodes, (sample_index,) if unfinished else ())
        return actions + self._retire(attempt)

    def abort(self, error: TandemError) -> list[Action]:
        """Ends the request with `error` from outside, in any state; does nothing after the end."""
        return [] if self.outcome is not None else self._fail(error)

    def tick(self, now: float) -> list[Action]:
        """Judges the deadlines; called a few times a second."""
        if self.outcome is not None:
            return []
        if now >= self.deadline:
            text = f"the request did not end within {self.spec.deadline_s:g} s"
            return self._fail(DeadlineError(text, request_id=self.spec.request_id))
        actions = self.moves.give_up_overdue(now)
        for attempt in list(self.attempts.live.values()):
            if attempt.request_id in self.attempts.live:
                actions += self._tick_attempt(attempt, now)
        return actions

    def _tick_attempt(self, attempt: Attempt, now: float) -> list[Action]:
        in_state_s = now - attempt.entered_at
        if attempt.state is AttemptState.QUEUED:
            if now - attempt.waits_since >= self.spec.queue_s:
                message = f"no node could take the request within {self.spec.queue_s:g} s"
                if attempt.error is None:
                    return self._fail(NoNodeError(message, request_id=self.spec.request_id))
                attempt.error.add(f"; since then {message}")
                return self._fail(attempt.error)
            return [Place(attempt.request_id)] if now >= attempt.not_before else []
        if attempt.state is AttemptState.PLACED and in_state_s >= self.spec.accept_s:
            names = ", ".join(sorted(node.node_id for node in attempt.awaiting))
            error = self._node_failed(f"no answer from {names} within {self.spec.accept_s:g} s")
            return self._attempt_failed(attempt, attempt.awaiting, set(), error, True, now)
        if self.attempts.has_lost_tokens(attempt, now - self.spec.accept_s):
            return self._attempt_failed(attempt, (), set(), self._node_failed("tokens were lost"), True, now)
        return []

    # --- from nodes -------------------------------------------------------------------------------------------

    def answered(
        self,
        node: NodeKey,
        message: Accepted | PromptLogprobs | Pooled | RequestFailed | Cancelled | Migrated,
        now: float,
    ) -> list[Action]:
        """Takes whatever a node says about this request besides tokens."""
        if isinstance(message, Accepted):
            return self.accepted(node, message, now)
        if isinstance(message, PromptLogprobs):
            return self.prompt_logprobs(node, message)
        if isinstance(message, Pooled):
            return self.pooled(node, message)
        if isinstance(message, RequestFailed):
            return self.request_failed(node, message, now)
        if isinstance(message, Migrated):
            return self.migrated(node, message, now)
        return self.cancelled(node, message)

    def accepted(self, node: NodeKey, message: Accepted, now: float) -> list[Action]:
        attempt = self.attempts.current(node, message)
        if attempt is None:
            return []
        attempt.awaiting.discard(node)
        self._note_cached(attempt, node, message.num_cached_tokens)
        if not attempt.awaiting and attempt.state is AttemptState.PLACED:
            attempt.enter(AttemptState.PREFILLING, now)
        return []

    def prompt_logprobs(self, node: NodeKey, message: PromptLogprobs) -> list[Action]:
        attempt = self.attempts.current(node, message)
        if attempt is None or not self.wants_prompt_logprobs():
            return []
        self._has_prompt_logprobs = True
        return [EmitPromptLogprobs(message.entries)]

    def pooled(self, node: NodeKey, message: Pooled) -> list[Action]:
        attempt = self.attempts.current(node, message)
        if attempt is None:
            return []
        for index in attempt.sample_indices:
            self.samples[index].finish("stop")
        return [EmitPooled(message.values), *self._retire(attempt)]

    def tokens(self, node: NodeKey, delta: TokenDelta, now: float) -> list[Action]:
        attempt = self.attempts.current(node, delta)
        actions: list[Action] = []
        if attempt is None and self.moves.under_way:
            attempt, actions = self.moves.arrived(node, delta, now)
        if attempt is None or delta.sample_index not in attempt.sample_indices:
            self.num_dropped_deltas += 1
            return []
        sample = self.samples[delta.sample_index]
        attempt.awaiting.discard(node)
        if not attempt.primary_streams and node == attempt.primary:
            attempt.primary_streams = True
            self.streams_since = self.streams_since or now
        if delta.num_cached_tokens:
            self._note_cached(attempt, node, delta.num_cached_tokens)
        if sample.is_contradicted_by(delta):
            error = self._node_failed("two nodes made different tokens")
            return actions + self._attempt_failed(attempt, {node}, set(), error, True, now)
        ready = sample.take(delta, self.spec.sampling.max_tokens, now)
        if not ready:
            self.num_dropped_deltas += sample.finish_reason is not None or delta.output_index < len(sample.token_ids)
            return actions
        if attempt.state is not AttemptState.STREAMING:
            attempt.enter(AttemptState.STREAMING, now)
        for d in ready:
            ending = d.finish_reason, d.stop_token_id, d.cumulative_logprob
            actions.append(EmitTokens(delta.sample_index, d.token_ids, d.logprobs, *ending))
        return actions + self._retire(attempt) if sample.finish_reason is not None else actions

    def migrated(self, node: NodeKey, message: Migrated, now: float) -> list[Action]:
        """Takes the old node's word on how a move ended there."""
        move = self.moves.under_way.get(message.sample_index)
        if move is None or move.successor.key != message.successor:
            return [] if message.reason else self._left_for_nowhere(node, message, now)
        if node != move.source.primary:
            return []
        if message.reason:
            return self.moves.give_up([message.sample_index], now)
        return self.moves.take_over(message.sample_index, now)

    def _left_for_nowhere(self, node: NodeKey, message: Migrated, now: float) -> list[Action]:
        """Starts anew a sample that left its node after its successor had been given up: nobody makes its tokens."""
        attempt = self.attempts.current(node, message)
        if attempt is None or message.sample_index not in self.attempts.unfinished(attempt):
            return []
        error = self._node_failed("a running request was lost between two nodes")
        return self._attempt_failed(attempt, (), set(), error, True, now)

    def request_failed(self, node: NodeKey, message: RequestFailed, now: float) -> list[Action]:
        attempt = self.attempts.current(node, message)
        if attempt is None:
            self.moves.successor_failed(node, message, now)
            return []
        error = failure_of(message.code, message.message, self.spec.request_id)
        attempt.failed_with(message.code)
        culprits = {node} if message.code != PEER_LOST else set(attempt.nodes) - {node}
        return self._node_gave_up(attempt, node, culprits, error, message.retryable, now)

    def node_lost(self, node: NodeKey, reason: str, now: float) -> list[Action]:
        """Takes the loss of a node: nothing more comes from this epoch of it."""
        self.attempts.node_lost(node)
        self.moves.node_lost(node, now)
        actions: list[Action] = []
        for attempt in self.attempts.on_node(node):
            if attempt.request_id in self.attempts.live:
                error = self._node_failed(f"node {node.node_id} was lost: {reason}")
                actions += self._node_gave_up(attempt, node, {node}, error, True, now)
        return actions

    def cancelled(self, node: NodeKey, message: Cancelled) -> list[Action]:
        if not message.sample_indices:
            self.attempts.pending_cancels.discard((node, message.key))
        return []

    # --- transitions ------------------------------------------------------------------------------------------

    def _note_cached(self, attempt: Attempt, node: NodeKey, num_cached_tokens: int) -> None:
        """What need not be computed is up to the node that computes the prompt: what the other one holds is not sent to
        it. Later attempts find the first one's blocks, which is no saving for the client."""
        if self.attempts.highest_number == 1 and node == (attempt.prefill or attempt.primary):
            in_prompt = min(num_cached_tokens, len(self.spec.prompt_token_ids))
            self.num_cached_tokens = max(self.num_cached_tokens, in_prompt)

    def _submit(self, attempt: Attempt, now: float) -> Submit:
        seen = self.attempts.seen(attempt)
        return submits.submit(self.spec, attempt, seen, self.wants_prompt_logprobs(), self.deadline - now)

    def _node_failed(self, message: str) -> NodeFailedError:
        return NodeFailedError(message, request_id=self.spec.request_id)

    def _retire(self, attempt: Attempt) -> list[Action]:
        """Drops the attempt when its last sample ended, and ends the request when it was the last attempt."""
        actions = self.moves.end_finished()
        if self.attempts.unfinished(attempt):
            return actions
        del self.attempts.live[attempt.request_id]
        if self.attempts.live:
            return actions
        self.outcome = Finish()
        return [*actions, self.outcome]

    def _node_gave_up(
        self,
        attempt: Attempt,
        node: NodeKey,
        culprits: set[NodeKey],
        error: TandemError,
        retryable: bool,
        now: float,
    ) -> list[Action]:
        if node == attempt.prefill and self.attempts.has_all_first_tokens(attempt):
            attempt.prefill = None  # its work is done: the decode node has streamed
            attempt.awaiting.discard(node)
            return []
        return self._attempt_failed(attempt, culprits, {node}, error, retryable, now)

    def _attempt_failed(
        self,
        attempt: Attempt,
        culprits: Iterable[NodeKey],
        already_clean: set[NodeKey],
        error: TandemError,
        retryable: bool,
        now: float,
    ) -> list[Action]:
        actions = self.moves.give_up(attempt.sample_indices, now)
        actions += self.attempts.cancel(attempt, [node for node in attempt.nodes if node not in already_clean])
        attempt.primary = attempt.prefill = None
        if not retryable or attempt.is_last(self.spec.max_attempts, self.spec.accept_s, now):
            return actions + self._fail(attempt.with_history(error))
        return actions + [Place(request_id) for request_id in self.attempts.replace(attempt, culprits, error, now)]

    def _fail(self, error: TandemError) -> list[Action]:
        assert self.outcome is None, "a request ends once"
        self.outcome = Fail(error)
        return [*self.moves.end_all(), *self.attempts.cancel_all(), self.outcome]

    def check_integrity(self) -> None:
        """Asserts that every unfinished sample has exactly one live attempt, and an ended request none."""
        self.attempts.check_integrity(ended=self.outcome is not None)
        self.moves.check_integrity()
        assert all(len(sample.token_ids) <= self.spec.sampling.max_tokens for sample in self.samples)
