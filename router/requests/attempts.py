"""The live attempts of one request, the numbers they have had, and the cancels that nodes have yet to answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.parts import AttemptMessage
from tandem.engine.contracts.wire.requests import Cancel, TokenDelta
from tandem.router.requests.actions import Action, SendToNode
from tandem.router.requests.parts import Attempt, AttemptState, Sample

OVERLOAD_BACKOFF_S = 0.2  # pause before the next attempt when a node's queue was full; a guess


class LiveAttempts:
    """The live attempts of one request. Every unfinished sample is in exactly one of them: at first all in one, later
    perhaps each in one of its own."""

    def __init__(self, request_id: str, samples: Sequence[Sample], now: float) -> None:
        self._request_id, self._samples = request_id, samples
        first = Attempt(request_id, 1, tuple(range(len(samples))), now)
        self.live: dict[str, Attempt] = {first.request_id: first}  # sub-request id -> its current attempt
        self.pending_cancels: set[tuple[NodeKey, AttemptKey]] = set()
        self.highest_number = 1
        self._numbers: dict[str, int] = {}  # highest attempt number of each sub-request

    # --- reading ----------------------------------------------------------------------------------------------

    def current(self, node: NodeKey, message: AttemptMessage | TokenDelta) -> Attempt | None:
        """The attempt that a message of `node` is about, unless it is an older one's or a stranger's."""
        attempt = self.live.get(message.request_id)
        if attempt is None or attempt.number != message.attempt or node not in (attempt.primary, attempt.prefill):
            return None
        return attempt

    def of_sample(self, sample_index: int) -> Attempt:
        return next(attempt for attempt in self.live.values() if sample_index in attempt.sample_indices)

    def on_node(self, node: NodeKey) -> list[Attempt]:
        return [attempt for attempt in self.live.values() if node in attempt.nodes]

    def queued(self) -> list[str]:
        """Sub-requests that want nodes."""
        return [a.request_id for a in self.live.values() if a.state is AttemptState.QUEUED]

    def is_untaken(self, request_id: str) -> bool:
        """Whether the sub-request wants nodes, or has asked some that have not all answered."""
        attempt = self.live.get(request_id)
        return attempt is not None and attempt.state in (AttemptState.QUEUED, AttemptState.PLACED)

    def may_be_placed(self, request_id: str, now: float) -> bool:
        """Whether the sub-request wants nodes, and has waited long enough since it was turned away."""
        attempt = self.live.get(request_id)
        return attempt is not None and attempt.state is AttemptState.QUEUED and now >= attempt.not_before

    def unfinished(self, attempt: Attempt) -> list[int]:
        return [i for i in attempt.sample_indices if self._samples[i].finish_reason is None]

    def has_lost_tokens(self, attempt: Attempt, before: float) -> bool:
        """Whether tokens of it have come whose predecessors were missing `before` that time already."""
        samples = [self._samples[i] for i in self.unfinished(attempt)]
        return any(sample.pending and sample.waits_since <= before for sample in samples)

    def seen(self, attempt: Attempt) -> list[int]:
        """Output tokens that the client has seen and that the attempt's prompt must contain."""
        if len(attempt.sample_indices) > 1:
            return []
        return self._samples[attempt.sample_indices[0]].token_ids

    def has_all_first_tokens(self, attempt: Attempt) -> bool:
        """Whether the prefill node owes nothing more: the decode node streams, and all tokens before its own are here.
        A prefill node may die after it handed over and before its own tokens reached the router."""
        return attempt.primary_streams and all(
            len(self._samples[i].token_ids) > attempt.num_prior for i in self.unfinished(attempt)
        )

    def work_on(self, node: NodeKey) -> set[AttemptKey]:
        """What this node may be working on."""
        running = {attempt.key for attempt in self.on_node(node)}
        return running | {key for where, key in self.pending_cancels if where == node}

    # --- changes ----------------------------------------------------------------------------------------------

    def next_number(self, request_id: str, attempt: Attempt) -> int:
        """The number of the attempt after `attempt`: no node has heard of it."""
        number = max(attempt.number, self._numbers.get(request_id, 0)) + 1
        self._numbers[request_id] = number
        self.highest_number = max(self.highest_number, number)
        return number

    def own_name(self, sample_index: int) -> str:
        """The name of the sub-request of one sample of several."""
        return f"{self._request_id}-s{sample_index}"

    def replace(self, attempt: Attempt, culprits: Iterable[NodeKey], error: TandemError, now: float) -> list[str]:
        """Puts the next attempts in the place of one that failed. Returns their sub-requests, which need nodes."""
        del self.live[attempt.request_id]
        backoff_s = OVERLOAD_BACKOFF_S if error.status == 429 else 0.0
        following = self._continuations(attempt)
        for request_id, indices in following:
            for i in indices:
                self._samples[i].pending.clear()
            number = self.next_number(request_id, attempt)
            self.live[request_id] = attempt.next(request_id, number, indices, culprits, error, now, backoff_s)
        return [request_id for request_id, _ in following]

    def _continuations(self, attempt: Attempt) -> list[tuple[str, tuple[int, ...]]]:
        """(sub-request id, samples) of the next attempt: together while nothing was emitted, else one by one."""
        unfinished = self.unfinished(attempt)
        if len(attempt.sample_indices) == 1 or not any(self._samples[i].token_ids for i in attempt.sample_indices):
            return [(attempt.request_id, tuple(unfinished))]
        return [(self.own_name(i), (i,)) for i in unfinished]

    def cancel(self, attempt: Attempt, nodes: Iterable[NodeKey], sample_indices: tuple[int, ...] = ()) -> list[Action]:
        """Cancels for these nodes of an attempt. `sample_indices` cancels only these of its samples; (): all."""
        message = Cancel(request_id=attempt.request_id, attempt=attempt.number, sample_indices=sample_indices)
        actions: list[Action] = []
        for node in nodes:
            if not sample_indices:
                self.pending_cancels.add((node, attempt.key))
            actions.append(SendToNode(node, message))
        return actions

    def cancel_all(self) -> list[Action]:
        """Cancels every live attempt, since the request is over."""
        actions = [action for attempt in self.live.values() for action in self.cancel(attempt, attempt.nodes)]
        self.live.clear()
        return actions

    def node_lost(self, node: NodeKey) -> None:
        """Stops waiting for the answers of a lost node to cancels."""
        self.pending_cancels = {cancel for cancel in self.pending_cancels if cancel[0] != node}

    def check_integrity(self, ended: bool) -> None:
        owners = [i for attempt in self.live.values() for i in attempt.sample_indices]
        assert len(owners) == len(set(owners)), "a sample has two live attempts"
        for attempt in self.live.values():
            attempt.check_integrity()
            assert self.unfinished(attempt), "a live attempt without an unfinished sample"
        assert not (ended and self.live), "an ended request has live attempts"
        for i, sample in enumerate(self._samples):
            assert ended or sample.finish_reason is not None or i in owners, "an unfinished sample has no live attempt"
