"""A decode node's logic: tickets, received KV, token streams. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import msgspec
import numpy as np

from tandem.decode_node.ticket_loads import TicketLoads
from tandem.engine.contracts.wire.parts import Candidates, Continuation, FirstToken
from tandem.engine.scheduling.prompt_order import SlackOrder
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step_pace import next_prompt_decision_at
from tandem.kv_connector.protocol.outcomes import Commit, Failed, Recompute, Released, SinkOutcome, failure_code
from tandem.node.requests import AcceptedRequest
from tandem.node.serving import ServingNode

# Seconds that a check takes. A step that waits for it begins later by at most so much, less StepPace's spare time.
CHECK_S = 0.0015  # docs/measurements.md#the-gap-of-a-hand-off


class DecodeNode(ServingNode):
    """Takes requests in mode "decode" (expect the KV from `peer`) and "full" (compute everything here); one of role
    "unified" also those in mode "prefill" (hand the KV to `peer`)."""

    @property
    def modes(self) -> frozenset[str]:
        return frozenset({"decode", "full", "prefill"} if self.info.role == "unified" else {"decode", "full"})

    @cached_property
    def _ticket_loads(self) -> TicketLoads:
        return TicketLoads(self.pool, self.scheduler.state.tiers, self.scheduler.state.block_size)

    def start(self, entry: AcceptedRequest, now: float) -> None:
        if entry.submit.mode == "decode":
            self.scheduler.state.kv.extend_hashes(entry.request)  # a router may leave hashing to the node
            if not (self._comes_from_afar(entry) and self._ticket_loads.begin(entry, now)):
                self._expect(entry, now)
        else:
            super().start(entry, now)

    def on_tick(self, now: float) -> None:
        for entry in self._ticket_loads.due(now):
            self._expect(entry, now)
            self._ticket_loads.forget(entry.request)
        super().on_tick(now)

    def launch_at(self) -> float:
        """Holds the next step back while KV is on its way here, as long as it can, and a little longer for what is
        being checked: else the KV would wait for that step. Behind a step of prompts alone it is decided late as on a
        prefill node, where prompts go by deadlines: those that come meanwhile may be the ones to go first."""
        running, order = self.scheduler.state.clock.running, self.scheduler.state.prompt_order
        if running is not None and running.is_prompts_alone and isinstance(order, SlackOrder):
            return next_prompt_decision_at(self.scheduler.state.clock)
        if not self.handoffs.sink.num_under_way:
            return 0.0
        return self.scheduler.pace.next_decision_at(CHECK_S if self.handoffs.sink.actions.num_verifying else 0.0)

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "sink_ticket_loads": float(self._ticket_loads.num_loads)}

    def stop(self, entry: AcceptedRequest, now: float) -> None:
        super().stop(entry, now)
        self._ticket_loads.forget(entry.request)
        if entry.submit.mode == "decode":
            self.handoffs.sink.cancel(entry.request.key, now)

    def on_sink_outcome(self, outcome: SinkOutcome) -> None:
        if isinstance(outcome, Commit):
            self._commit(outcome)
        elif isinstance(outcome, Recompute):
            self._recompute(outcome)
        elif isinstance(outcome, Failed):
            text = f"the hand-off failed: {outcome.reason}"
            self.book.fail(outcome.request.key, failure_code(outcome.reason), text, outcome.retryable)
        else:
            assert isinstance(outcome, Released)
            self.book.prompt_left(outcome.request.key)

    def _comes_from_afar(self, entry: AcceptedRequest) -> bool:
        """Whether the KV of its prompt comes from another host. A peer that was not greeted yet may be one."""
        peer = entry.submit.peer
        assert peer is not None, "a decode node is told who hands over"
        info = self.handoffs.source.peers.get(peer.key)
        return info is not None and info.host_id != self.info.host_id and not entry.submit.is_running

    def _expect(self, entry: AcceptedRequest, now: float) -> None:
        self.book.accept(entry, self.handoffs.sink.expect(entry.submit, entry.request, now))

    def _commit(self, commit: Commit) -> None:
        entry = self.book.entries.get(commit.request.key)
        if entry is None:
            self.pool.free(list(commit.block_ids), None)
            return
        if commit.continuation is not None:
            self._take_over(entry, commit, commit.continuation)
            return
        blocks, num_cached_tokens = list(commit.block_ids), commit.num_cached_tokens
        candidates = candidates_of(commit.first_tokens)
        if candidates is not None:
            self.scheduler.beams.add_committed(commit.request, blocks, candidates, num_cached_tokens)
            return
        first_tokens = self._close_samples(entry, commit.first_tokens)
        self.scheduler.state.add_committed(commit.request, blocks, first_tokens, num_cached_tokens)

    def _take_over(self, entry: AcceptedRequest, commit: Commit, continuation: Continuation) -> None:
        """Goes on with a sequence that ran elsewhere, behind its newest token."""
        request = commit.request
        known = known_tokens(request, continuation.token_ids)
        (sample,) = request.sample_indices
        self._repeat(entry, continuation)
        self.scheduler.state.add_committed(
            continued(request, sample, known[:-1]), list(commit.block_ids), [FirstToken(sample, int(known[-1]), False)]
        )

    def _repeat(self, entry: AcceptedRequest, continuation: Continuation) -> None:
        """Sends the router the tokens that the source may not have sent before its end. Not where log-probabilities
        were asked for, which the source alone has."""
        request = entry.request
        if continuation.token_ids and request.prompt.sampling.num_logprobs is None:
            (sample,) = request.sample_indices
            self.book.repeat(entry, sample, request.prompt.num_prior_output_tokens, continuation.token_ids)

    def _close_samples(self, entry: AcceptedRequest, first_tokens: Sequence[FirstToken]) -> list[FirstToken]:
        """Closes samples that ended with their first token. Returns all first tokens, those as finished whose sample
        does not go on here, since it ended or was cancelled meanwhile."""
        entry.close(token.sample_index for token in first_tokens if token.finished)
        return [
            FirstToken(t.sample_index, t.token_id, t.finished or t.sample_index not in entry.open_samples)
            for t in first_tokens
        ]

    def _recompute(self, recompute: Recompute) -> None:
        """Lets each open sample go on alone, its first token at the tail of its prompt."""
        entry = self.book.entries.get(recompute.request.key)
        if entry is None:
            return
        request, continuation = recompute.request, recompute.continuation
        if continuation is not None:
            known = known_tokens(request, continuation.token_ids)
            self._repeat(entry, continuation)
            self.scheduler.state.add(continued(request, request.sample_indices[0], known))
        if candidates_of(recompute.first_tokens) is not None:  # nobody has drawn anything yet
            self.scheduler.state.add(request)
            return
        for token in self._close_samples(entry, recompute.first_tokens):
            if not token.finished:
                known = known_tokens(request, [token.token_id])
                self.scheduler.state.add(continued(request, token.sample_index, known))


def known_tokens(request: Request, output: Sequence[int]) -> np.ndarray:
    """The request's prompt and the `output` that was made behind it elsewhere, int32 [num_tokens]."""
    return np.append(request.prompt.token_ids, np.array(output, np.int32))


def continued(request: Request, sample_index: int, token_ids: np.ndarray) -> Request:
    """`request` narrowed to one sample, with `token_ids` as its prompt: what differs in length from its own is output
    that the client has."""
    prompt = replace(
        request.prompt,
        token_ids=token_ids,
        sampling=msgspec.structs.replace(request.prompt.sampling, num_prompt_logprobs=None),
        num_prior_output_tokens=len(token_ids) - request.prompt.num_true_tokens,
        mode="full",
    )
    return Request(prompt, (sample_index,), list(request.block_hashes))


def candidates_of(first_tokens: Sequence[FirstToken]) -> Candidates | None:
    """What may follow the prompt of a request that searches with beams; None: it draws."""
    return next((token.candidates for token in first_tokens if token.candidates is not None), None)
