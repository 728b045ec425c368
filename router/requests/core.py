"""State and transitions of a request machine; the events that drive it are in `request_machine`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.wire.requests import Cancel, Submit
from tandem.router.placing.view import NodeKey
from tandem.router.requests.actions import Action, Fail, Finish, Place, RequestSpec, Send
from tandem.router.requests.parts import Attempt, AttemptState, Sample

OVERLOAD_BACKOFF_S = 0.2  # before the next attempt when a node's queue was full


@dataclass
class RequestCore:
    """One request: its samples, the live attempts that make them, and how it ended."""

    spec: RequestSpec
    now: float
    samples: list[Sample] = field(init=False)
    live: dict[str, Attempt] = field(init=False)  # sub-request id -> its current attempt
    outcome: Finish | Fail | None = None
    num_cached_tokens: int = 0
    num_dropped_deltas: int = 0
    num_attempts: int = 1  # highest attempt number so far
    has_prompt_logprobs: bool = False
    pending_cancels: set[tuple[NodeKey, str, int]] = field(default_factory=set)
    placed_at: float | None = None
    _numbers: dict[str, int] = field(default_factory=dict)  # highest attempt number of each sub-request

    def __post_init__(self) -> None:
        self.samples = [Sample() for _ in range(self.spec.num_samples)]
        first = Attempt(self.spec.request_id, 1, tuple(range(self.spec.num_samples)), self.now)
        self.live = {first.request_id: first}
        self.deadline = self.now + self.spec.deadline_s

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> AttemptState:
        """Of the whole request: its least advanced sub-request's."""
        if self.outcome is not None:
            return AttemptState.FINISHED if isinstance(self.outcome, Finish) else AttemptState.FAILED
        return min((attempt.state for attempt in self.live.values()), key=lambda state: state.value)

    @property
    def closed(self) -> bool:
        """Ended, and every node that was told to cancel has answered or is gone."""
        return self.outcome is not None and not self.pending_cancels

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def waiting(self) -> list[str]:
        """Sub-requests that want nodes."""
        return [a.request_id for a in self.live.values() if a.state is AttemptState.QUEUED]

    def prompt_of(self, request_id: str) -> npt.NDArray[np.int32]:
        """The prompt of the sub-request's next Submit: the client's, then what this sample has emitted."""
        return self._prompt(self.live[request_id])

    def _prompt(self, attempt: Attempt) -> npt.NDArray[np.int32]:
        seen = self._seen(attempt)
        if not seen:
            return self.spec.prompt_token_ids
        return np.concatenate([self.spec.prompt_token_ids, np.array(seen, dtype=np.int32)])

    def nodes_to_avoid(self, request_id: str) -> frozenset[NodeKey]:
        return frozenset(self.live[request_id].avoid)

    def work_on(self, node: NodeKey) -> set[tuple[str, int]]:
        """(sub-request, attempt) that this node may be working on."""
        running = {(a.request_id, a.number) for a in self.live.values() if node in a.nodes}
        return running | {(name, number) for where, name, number in self.pending_cancels if where == node}

    def wants_prompt_logprobs(self) -> bool:
        return self.spec.sampling.num_prompt_logprobs is not None and not self.has_prompt_logprobs

    # --- transitions ------------------------------------------------------------------------------------------

    def _current(self, node: NodeKey, request_id: str, number: int) -> Attempt | None:
        attempt = self.live.get(request_id)
        if attempt is None or attempt.number != number or node not in (attempt.primary, attempt.prefill):
            return None
        return attempt

    def _note_cached(self, attempt: Attempt, node: NodeKey, num_cached_tokens: int) -> None:
        """What need not be computed is up to the node that computes the prompt: what the other one holds is not sent to
        it. Later attempts find the first one's blocks, which is no saving for the client."""
        if self.num_attempts == 1 and node == (attempt.prefill or attempt.primary):
            self.num_cached_tokens = max(
                self.num_cached_tokens, min(num_cached_tokens, len(self.spec.prompt_token_ids))
            )

    def _seen(self, attempt: Attempt) -> list[int]:
        if len(attempt.sample_indices) > 1:
            return []
        return self.samples[attempt.sample_indices[0]].token_ids

    def _submit(self, attempt: Attempt, now: float) -> Submit:
        sampling = self.spec.sampling
        if not self.wants_prompt_logprobs():
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        return Submit(
            request_id=attempt.request_id,
            attempt=attempt.number,
            mode="full",
            prompt_token_ids=self._prompt(attempt).astype("<i4", copy=False).tobytes(),
            num_prior_output_tokens=len(self._seen(attempt)),
            sample_indices=attempt.sample_indices,
            sampling=sampling,
            priority=self.spec.priority,
            deadline_s=max(0.001, self.deadline - now),
            use_prefix_cache=self.spec.use_prefix_cache,
            salt=self.spec.secrecy.salt,
            num_public_tokens=self.spec.secrecy.num_public_tokens,
            cache_share=self.spec.cache_share,
        )

    def _unfinished(self, attempt: Attempt) -> list[int]:
        return [i for i in attempt.sample_indices if self.samples[i].finish_reason is None]

    def _retire(self, attempt: Attempt) -> list[Action]:
        """Drops the attempt when its last sample ended, and ends the request when it was the last attempt."""
        if self._unfinished(attempt):
            return []
        del self.live[attempt.request_id]
        if self.live:
            return []
        self.outcome = Finish()
        return [self.outcome]

    def _node_gave_up(
        self,
        attempt: Attempt,
        node: NodeKey,
        culprits: set[NodeKey],
        error: TandemError,
        retryable: bool,
        now: float,
    ) -> list[Action]:
        if node == attempt.prefill and self._has_all_first_tokens(attempt):
            attempt.prefill = None  # its work is done: the decode node has streamed
            attempt.awaiting.discard(node)
            return []
        return self._attempt_failed(attempt, culprits, {node}, error, retryable, now)

    def _has_all_first_tokens(self, attempt: Attempt) -> bool:
        """The prefill node owes nothing more: the decode node streams, and what came before its tokens is here. A
        prefill node may die after it handed over and before its own tokens reached the router."""
        return attempt.handed_off and all(
            len(self.samples[i].token_ids) > attempt.num_prior for i in self._unfinished(attempt)
        )

    def _attempt_failed(
        self,
        attempt: Attempt,
        culprits: Iterable[NodeKey],
        already_clean: set[NodeKey],
        error: TandemError,
        retryable: bool,
        now: float,
    ) -> list[Action]:
        actions = self._cancel(attempt, [node for node in attempt.nodes if node not in already_clean], ())
        attempt.primary = attempt.prefill = None
        if not retryable or self._was_last(attempt, now):
            return actions + self._fail(self._with_history(attempt, error))
        del self.live[attempt.request_id]
        backoff_s = OVERLOAD_BACKOFF_S if error.status == 429 else 0.0
        for request_id, indices in self._continuations(attempt):
            for i in indices:
                self.samples[i].pending.clear()
            number = self._next_number(request_id, attempt)
            self.live[request_id] = attempt.next(request_id, number, indices, culprits, error, now, backoff_s)
            actions.append(Place(request_id))
        return actions

    def _was_last(self, attempt: Attempt, now: float) -> bool:
        """Whether no attempt may follow one that failed. Being turned away costs time and no attempt."""
        if attempt.was_turned_away:
            return now - attempt.waits_since >= self.spec.queue_s
        return attempt.num_failures + 1 >= self.spec.max_attempts

    @staticmethod
    def _with_history(attempt: Attempt, error: TandemError) -> TandemError:
        """The last error of several, with how many there were and the one before."""
        if attempt.num_failures and attempt.error is not None:
            error.message += f" (failure {attempt.num_failures + 1} of the request; before: {attempt.error.message})"
        return error

    def may_be_placed(self, request_id: str, now: float) -> bool:
        """Whether the sub-request wants nodes, and has waited long enough since it was turned away."""
        attempt = self.live.get(request_id)
        return attempt is not None and attempt.state is AttemptState.QUEUED and now >= attempt.not_before

    def _next_number(self, request_id: str, attempt: Attempt) -> int:
        """For the attempt after `attempt`: no node has heard of it."""
        number = max(attempt.number, self._numbers.get(request_id, 0)) + 1
        self._numbers[request_id] = number
        self.num_attempts = max(self.num_attempts, number)
        return number

    def _continuations(self, attempt: Attempt) -> list[tuple[str, tuple[int, ...]]]:
        """(sub-request id, samples) of the next attempt: together while nothing was emitted, else one by one."""
        unfinished = self._unfinished(attempt)
        if len(attempt.sample_indices) == 1 or not any(self.samples[i].token_ids for i in attempt.sample_indices):
            return [(attempt.request_id, tuple(unfinished))]
        return [(f"{self.spec.request_id}-s{i}", (i,)) for i in unfinished]

    def _cancel(self, attempt: Attempt, nodes: Iterable[NodeKey], sample_indices: tuple[int, ...]) -> list[Action]:
        message = Cancel(request_id=attempt.request_id, attempt=attempt.number, sample_indices=sample_indices)
        actions: list[Action] = []
        for node in nodes:
            if not sample_indices:
                self.pending_cancels.add((node, attempt.request_id, attempt.number))
            actions.append(Send(node, message))
        return actions

    def _fail(self, error: TandemError) -> list[Action]:
        assert self.outcome is None, "a request ends once"
        actions: list[Action] = []
        for attempt in self.live.values():
            actions += self._cancel(attempt, attempt.nodes, ())
        self.live.clear()
        self.outcome = Fail(error)
        return [*actions, self.outcome]

    def check_integrity(self) -> None:
        """Asserts that every unfinished sample has exactly one live attempt, and an ended request none."""
        owners = [i for attempt in self.live.values() for i in attempt.sample_indices]
        assert len(owners) == len(set(owners)), "a sample has two live attempts"
        for attempt in self.live.values():
            attempt.check_integrity()
            assert self._unfinished(attempt), "a live attempt without an unfinished sample"
        if self.outcome is not None:
            assert not self.live, "an ended request has live attempts"
            return
        for i, sample in enumerate(self.samples):
            assert len(sample.token_ids) <= self.spec.sampling.max_tokens
            assert sample.finish_reason is not None or i in owners, "an unfinished sample has no live attempt"
