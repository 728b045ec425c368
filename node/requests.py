"""The book of routers' requests: which router gave which, and what is still owed to it. Sans-IO.

Accepts Submit and Cancel idempotently, turns engine events into one Tokens message a step for each router, and sees to
it that every accepted request ends exactly once: by its last token, a failure, a cancel, its deadline or its router's
loss.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.engine.contracts.hashing import Secrecy
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.tenants import TenantShares, tenant_of_salt
from tandem.engine.contracts.wire.parts import EncoderFacts, Message
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancelled,
    Pooled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
    Tokens,
)
from tandem.engine.scheduling.request import (
    BeamsEvent,
    EngineEvent,
    FailedEvent,
    PooledEvent,
    Prompt,
    PromptLogprobsEvent,
    Request,
    TokensEvent,
)
from tandem.node.submit_check import problem_of

NUM_TOMBSTONES = 65536  # a guess: ended attempts that are remembered, so that a late repetition starts nothing


@dataclass(slots=True)
class AcceptedRequest:
    """A live request. `open_samples` are those that have not ended."""

    request: Request
    router: NodeKey
    submit: Submit
    deadline: float
    open_samples: set[int]
    num_cached_tokens: int = 0

    def close(self, samples: Iterable[int]) -> None:
        self.open_samples.difference_update(samples)


@dataclass
class RequestBook:
    """The requests of one node. `max_queue` bounds accepted requests that wait; times are monotonic seconds, passed
    in."""

    vocab_size: int
    max_model_len: int
    tenant_shares: TenantShares = field(default_factory=TenantShares)
    media_kinds: frozenset[str] = frozenset()  # what the model takes beside text
    encoder: EncoderFacts | None = None
    entries: dict[AttemptKey, AcceptedRequest] = field(default_factory=dict)
    num_accepted: int = 0
    num_ended: int = 0

    def __post_init__(self) -> None:
        self._tombstones: OrderedDict[AttemptKey, NodeKey] = OrderedDict()  # and whose they were
        self._deadlines: list[tuple[float, AttemptKey]] = []
        self._outbox: list[tuple[NodeKey, Message]] = []
        self._deltas: dict[NodeKey, list[TokenDelta]] = {}
        self._attempts: dict[str, set[int]] = {}  # of live entries, by request id
        self._arrivals = 0

    # --- requests in ----------------------------------------------------------------------------------------

    def older_attempts(self, newer: AcceptedRequest) -> list[AcceptedRequest]:
        """The live attempts of the same router's request with lower numbers, in order."""
        name, number = newer.request.key
        older = [self.entries[AttemptKey(name, each)] for each in sorted(self._attempts[name]) if each < number]
        return [entry for entry in older if entry.router == newer.router]

    def open(self, router: NodeKey, submit: Submit, now: float, adapter: object = None) -> AcceptedRequest | None:
        """A new entry to be started by the caller, or None when `submit` was answered here (duplicate, invalid, of
        a name that another router has used). `adapter`: in host memory, as long as the entry lives."""
        key = submit.key
        if self._router_of(key) not in (None, router):
            # No duplicate: "accepted" would promise tokens that go to the other, or have gone.
            self.refuse(router, submit, "name_taken", "another router has a request of this name", retryable=True)
            return None
        if key in self.entries:
            self._accept(self.entries[key])
            return None
        if key in self._tombstones:
            self._send(router, Accepted(request_id=submit.request_id, attempt=submit.attempt))
            return None
        problem = problem_of(submit, self.vocab_size, self.max_model_len, self.media_kinds, self.encoder)
        if problem:
            self.refuse(router, submit, "invalid_request", problem, retryable=False)
            return None
        self.tenant_shares.note(tenant_of_salt(submit.salt), submit.cache_share)
        request = self._make_request(submit, adapter)
        entry = AcceptedRequest(request, router, submit, now + submit.deadline_s, set(submit.sample_indices))
        self.entries[key] = entry
        self._attempts.setdefault(submit.request_id, set()).add(submit.attempt)
        heapq.heappush(self._deadlines, (entry.deadline, key))
        self.num_accepted += 1
        return entry

    def accept(self, entry: AcceptedRequest, num_cached_tokens: int = 0) -> None:
        """Answers the Submit of an entry that was started."""
        entry.num_cached_tokens = num_cached_tokens
        self._accept(entry)

    def refuse(self, router: NodeKey, submit: Submit, code: str, message: str, retryable: bool) -> None:
        """Answers a Submit that never got an entry."""
        self._send(
            router,
            RequestFailed(
                request_id=submit.request_id, attempt=submit.attempt, code=code, message=message, retryable=retryable
            ),
        )

    def cancel_samples(
        self, router: NodeKey, key: AttemptKey, samples: Sequence[int]
    ) -> tuple[AcceptedRequest | None, bool]:
        """Closes `samples` (all when empty) and answers. Returns the entry, if it lived, and whether nothing of it is
        left. Another router's entry is not touched."""
        self._send(router, Cancelled(request_id=key.request_id, attempt=key.attempt, sample_indices=tuple(samples)))
        entry = self.entries.get(key)
        if entry is None:
            self._bury(key, router)
            return None, False
        if entry.router != router:
            return None, False
        entry.close(samples or list(entry.open_samples))
        if entry.open_samples:
            return entry, False
        self._end(key)
        return entry, True

    # --- engine events out ----------------------------------------------------------------------------------

    def on_events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            entry = self.entries.get(event.request.key)
            if entry is None:
                continue
            if isinstance(event, TokensEvent):
                self._on_tokens(entry, event)
            elif isinstance(event, BeamsEvent):
                self._on_beams(entry, event)
            elif isinstance(event, PromptLogprobsEvent):
                message = PromptLogprobs(
                    request_id=entry.request.key.request_id, attempt=entry.request.key.attempt, entries=event.entries
                )
                self._flush(entry.router)
                self._send(entry.router, message)
            elif isinstance(event, PooledEvent):
                key = event.request.key
                self._send(entry.router, Pooled(request_id=key.request_id, attempt=key.attempt, values=event.values))
                self._end(key)
            else:
                assert isinstance(event, FailedEvent)
                self.fail(event.request.key, event.code, event.message, event.retryable)

    def fail(self, key: AttemptKey, code: str, message: str, retryable: bool) -> AcceptedRequest | None:
        """Ends the request with an error; None when it had ended already."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        self._flush(entry.router)
        self.refuse(entry.router, entry.submit, code, message, retryable)
        self._end(key)
        return entry

    def prompt_left(self, key: AttemptKey) -> None:
        """Ends a prompt in mode "prefill": it is the sink's now, and nothing more of it comes from here."""
        if key in self.entries:
            self._end(key)

    def sample_left(self, key: AttemptKey, sample_index: int) -> None:
        """Ends a running sample: it is another node's now, and nothing more of it comes from here."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.open_samples.discard(sample_index)
            if not entry.open_samples:
                self._end(key)

    def repeat(self, entry: AcceptedRequest, sample_index: int, output_index: int, token_ids: Sequence[int]) -> None:
        """Sends tokens that another node has sent, or was about to send; the router drops those that it has."""
        key = entry.request.key
        delta = TokenDelta(*key, sample_index, output_index, tuple(token_ids))
        self._deltas.setdefault(entry.router, []).append(delta)

    def expired(self, now: float) -> list[AcceptedRequest]:
        """Entries whose deadline has passed; each was told DeadlineError and has ended. The caller aborts them."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            entry = self.entries.get(key)
            if entry is not None and entry.deadline <= now:
                self.fail(key, "deadline_exceeded", "the request's deadline passed", retryable=False)
                ended.append(entry)
        return ended

    def router_lost(self, router: NodeKey) -> list[AcceptedRequest]:
        """Ends everything of that router silently. The caller aborts the entries."""
        lost = [entry for entry in self.entries.values() if entry.router == router]
        for entry in lost:
            self._end(entry.request.key)
        self._deltas.pop(router, None)
        return lost

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        """The messages to routers, in order. All tokens since the last call are one message for each router."""
        for router in list(self._deltas):
            self._flush(router)
        outbox, self._outbox = self._outbox, []
        return outbox

    def check_integrity(self) -> None:
        assert self.num_accepted == self.num_ended + len(self.entries), "an accepted request ended not exactly once"
        attempts = {AttemptKey(name, attempt) for name, numbers in self._attempts.items() for attempt in numbers}
        assert attempts == self.entries.keys(), "attempts are miscounted"
        for key, entry in self.entries.items():
            assert entry.open_samples, f"{key} lives without an open sample"
            assert key not in self._tombstones, f"{key} lives and is buried"

    # --- inside ---------------------------------------------------------------------------------------------

    def _make_request(self, submit: Submit, adapter: object) -> Request:
        self._arrivals += 1
        prompt = Prompt(
            key=submit.key,
            token_ids=np.frombuffer(submit.prompt_token_ids, "<i4").astype(np.int32),
            sampling=submit.sampling,
            num_prior_output_tokens=submit.num_prior_output_tokens,
            priority=submit.priority,
            targets=submit.targets,
            waited_s=submit.waited_s,
            arrival=self._arrivals,
            mode=submit.mode,
            use_prefix_cache=submit.use_prefix_cache,
            secrecy=Secrecy(submit.salt, submit.num_public_tokens, submit.context),
            media=submit.media,
            adapter=submit.adapter,
            adapter_weights=adapter,
        )
        return Request(prompt, submit.sample_indices)

    def _on_tokens(self, entry: AcceptedRequest, event: TokensEvent) -> None:
        if event.sample_index not in entry.open_samples:
            return
        delta = TokenDelta(
            entry.request.key.request_id,
            entry.request.key.attempt,
            event.sample_index,
            event.output_index,
            event.token_ids,
            event.finish_reason,
            event.stop_token_id,
            event.logprobs,
            max(entry.num_cached_tokens, event.request.num_cached_tokens),
        )
        self._deltas.setdefault(entry.router, []).append(delta)
        if event.finish_reason is not None:
            entry.open_samples.discard(event.sample_index)
            if not entry.open_samples:
                self._end(entry.request.key)

    def _on_beams(self, entry: AcceptedRequest, event: BeamsEvent) -> None:
        """Sends each sample whole: what a beam says is sure at the end alone."""
        key, num_cached_tokens = entry.request.key, max(entry.num_cached_tokens, event.request.num_cached_tokens)
        deltas = self._deltas.setdefault(entry.router, [])
        for found in event.outputs:
            if found.sample_index in entry.open_samples:
                delta = TokenDelta(
                    *key,
                    found.sample_index,
                    entry.request.prompt.num_prior_output_tokens,
                    found.token_ids,
                    found.finish_reason,
                    found.stop_token_id,
                    found.logprobs,
                    num_cached_tokens,
                    found.sum_logprobs,
                )
                deltas.append(delta)
        self._end(key)

    def _flush(self, router: NodeKey) -> None:
        deltas = self._deltas.pop(router, None)
        if deltas:
            self._send(router, Tokens(deltas=tuple(deltas)))

    def _accept(self, entry: AcceptedRequest) -> None:
        request = entry.request
        answer = Accepted(
            request_id=request.key.request_id, attempt=request.key.attempt, num_cached_tokens=entry.num_cached_tokens
        )
        self._send(entry.router, answer)

    def _send(self, router: NodeKey, message: Message) -> None:
        self._outbox.append((router, message))

    def _router_of(self, key: AttemptKey) -> NodeKey | None:
        """The router that has submitted or cancelled this attempt; None: nobody has, as far as is remembered."""
        entry = self.entries.get(key)
        return self._tombstones.get(key) if entry is None else entry.router

    def _end(self, key: AttemptKey) -> None:
        entry = self.entries.pop(key)
        self._attempts[key.request_id].remove(key.attempt)
        if not self._attempts[key.request_id]:
            del self._attempts[key.request_id]
        self.num_ended += 1
        self._bury(key, entry.router)

    def _bury(self, key: AttemptKey, router: NodeKey) -> None:
        self._tombstones.setdefault(key, router)
        if len(self._tombstones) > NUM_TOMBSTONES:
            self._tombstones.popitem(last=False)
