"""Carries out what the request machines decide: places, sends, turns tokens into text, tells the listeners.

One per router process, on its event loop. It holds no policy of its own: order and retries are the machine's, the
choice of nodes is placement's, text is the samples'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.contracts.errors import NodeFailedError, NoNodeError, TandemError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.requests import Accepted, Cancel, Migrated, RequestFailed, Tokens
from tandem.engine.process.process_log import RateLimited
from tandem.router.metrics.router_metrics import RouterMetrics
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.link import RequestMessage
from tandem.router.nodes.orphans import Orphans
from tandem.router.placing.placement import Placement
from tandem.router.recent.ring import RecentRequests
from tandem.router.recent.story import RequestStory
from tandem.router.requests.actions import (
    Action,
    EmitPooled,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    Moved,
    Place,
    SendToNode,
)
from tandem.router.requests.generation import Generation
from tandem.router.requests.placing import find_nodes
from tandem.router.requests.token_times import TokenTimes

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)


@dataclass(frozen=True, slots=True)
class _CountPlaced:
    """The order to count a placement, carried out after what the placement sends, so that nodes hear of it first."""

    reason: str
    is_first: bool
    queue_s: float


class Dispatcher:
    """The generations under way: what happens goes to their machines, what those answer is carried out.

    The cluster's events come here. An exception that nobody expected costs the generation that it is about.
    """

    def __init__(
        self, cluster: Cluster, metrics: RouterMetrics, recent: RecentRequests, clock: Callable[[], float]
    ) -> None:
        self._cluster, self._metrics, self._recent, self._clock = cluster, metrics, recent, clock
        self.active: set[Generation] = set()
        # Sub-request id -> its generation. Whoever had to wait stays here until a node takes it: full nodes would let
        # in as many more each time that those who wait ask.
        self.waiting: dict[str, Generation] = {}
        self._by_id: dict[str, Generation] = {}
        self._orphans = Orphans()
        self._times = TokenTimes(metrics)

    def start(self, generation: Generation) -> None:
        self.active.add(generation)
        self._recent.begin(generation.story)
        self.carry_out(generation, generation.machine.start())

    def tick(self, now: float) -> None:
        for generation in list(self.active):
            try:
                actions = generation.machine.tick(now)
                if actions:
                    self.carry_out(generation, actions)
            except Exception:
                self._give_up(generation)

    def check_integrity(self) -> None:
        for generation in self.active:
            generation.machine.check_integrity()
            assert not generation.machine.closed, "a closed generation is still active"
        assert set(self._by_id.values()) <= self.active
        assert set(self.waiting.values()) <= self.active

    # --- events of the cluster --------------------------------------------------------------------------------

    def on_message(self, node: NodeKey, message: RequestMessage) -> None:
        now = self._clock()
        if isinstance(message, Tokens):
            self._on_tokens(node, message, now)
            return
        generation = self._by_id.get(message.request_id)
        if generation is not None:
            note_answer(generation.story, node, message, now)
            try:
                self.carry_out(generation, generation.machine.answered(node, message, now))
            except Exception:
                self._give_up(generation)
            self._note_taken(generation, message.request_id)

    def _on_tokens(self, node: NodeKey, message: Tokens, now: float) -> None:
        self._times.begin(now)
        for delta in message.deltas:
            generation = self._by_id.get(delta.request_id)
            if generation is None:
                self._metrics.dropped_deltas.inc()
                continue
            machine = generation.machine
            dropped = machine.num_dropped_deltas
            try:
                actions = machine.tokens(node, delta, now)
                if machine.num_dropped_deltas != dropped:
                    self._metrics.dropped_deltas.inc()
                self.carry_out(generation, actions)
            except Exception:
                self._give_up(generation)
            self._note_taken(generation, delta.request_id)
        self._times.end()

    def on_up(self, node: NodeKey) -> None:
        """Cancels attempts that were given up when the connection to this node broke: it may still work on them."""
        for key in self._orphans.returned(node):
            self._cluster.send(node, Cancel(request_id=key.request_id, attempt=key.attempt), self._clock())

    def on_lost(self, node: NodeKey, reason: str) -> None:
        self._metrics.nodes_lost.inc()
        now = self._clock()
        orphans: set[AttemptKey] = set()
        for generation in list(self.active):
            try:
                work = generation.machine.work_on(node)
                if work:
                    generation.story.note(now, "node lost", node=node.node_id, why=reason)
                orphans |= work
                self.carry_out(generation, generation.machine.node_lost(node, reason, now))
            except Exception:
                self._give_up(generation)
        self._orphans.lost(node, orphans)

    def _note_taken(self, generation: Generation, request_id: str) -> None:
        if request_id in self.waiting and not generation.machine.attempts.is_untaken(request_id):
            del self.waiting[request_id]

    def on_room(self) -> None:
        for request_id, generation in list(self.waiting.items()):
            try:
                self.carry_out(generation, [Place(request_id)])
            except Exception:
                self._give_up(generation)

    def _give_up(self, generation: Generation) -> None:
        """Ends one request. To be called in the handler of an exception that nobody expected, which costs no other."""
        request_id = generation.machine.spec.request_id
        repeated.exception("request %s failed by an error of this router", request_id, request_id=request_id)
        error = TandemError("the server made an error; its log says more", request_id=request_id)
        try:
            was_over = generation.machine.outcome is not None  # then nobody told the listener so
            self.carry_out(generation, generation.machine.abort(error))
            if was_over:
                generation.listener.failed(generation.prompt_index, error)
        except Exception:
            text = "request %s can't be cancelled either; it is forgotten"
            repeated.exception(text, request_id, request_id=request_id)
            self._forget(generation)
            try:
                generation.listener.failed(generation.prompt_index, error)
            except Exception:
                repeated.exception("request %s: nobody can be told", request_id, request_id=request_id)

    # --- actions ----------------------------------------------------------------------------------------------

    def carry_out(self, generation: Generation, actions: Sequence[Action]) -> None:
        """Carries actions out in order; what one of them leads to comes after those that were decided before it."""
        work: list[Action | _CountPlaced] = list(actions)
        for action in work:  # the list grows meanwhile
            if isinstance(action, EmitTokens):
                work += self._emit(generation, action)
            elif isinstance(action, SendToNode):
                work += self._send(generation, action)
            elif isinstance(action, Moved):
                generation.moved_samples.add(action.sample_index)
                generation.story.note(self._clock(), "moved", sample=action.sample_index)
            elif isinstance(action, Place):
                work += self._place(generation, action.request_id)
            elif isinstance(action, _CountPlaced):
                self._count(action)
            elif isinstance(action, EmitPromptLogprobs):
                generation.listener.prompt_logprobs(generation.prompt_index, action.entries)
            elif isinstance(action, EmitPooled):
                generation.listener.pooled(generation.prompt_index, action.values)
            else:
                self._end(generation, action)
        if generation.machine.closed:
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self.active.discard(generation)
        self._cluster.forerunners.settled(generation.machine.spec.request_id, self._clock())
        for request_id in generation.submitted_ids:
            self._by_id.pop(request_id, None)
        for request_id in [key for key, waiting in self.waiting.items() if waiting is generation]:
            del self.waiting[request_id]
        self._metrics.active.set(len(self.active))

    def _emit(self, generation: Generation, action: EmitTokens) -> Sequence[Action]:
        if generation.first_token_at is None:
            self._cluster.forerunners.settled(generation.machine.spec.request_id, self._clock())
        sample = generation.samples[action.sample_index]
        piece = sample.feed(action)
        if piece is None:
            return ()
        self._times.count(generation, action.sample_index, len(piece.token_ids))
        generation.listener.piece(generation.prompt_index, action.sample_index, piece)
        return generation.machine.stop_sample(action.sample_index) if sample.stopped else ()

    def _send(self, generation: Generation, action: SendToNode) -> Sequence[Action]:
        generation.node_ids[action.node.node_id] = None
        generation.submitted_ids.add(action.message.request_id)
        self._by_id[action.message.request_id] = generation
        generation.story.sent(action.node, action.message.request_id)
        now = self._clock()
        if self._cluster.send(action.node, action.message, now):
            return ()
        return generation.machine.node_lost(action.node, "it is not connected", now)

    def _place(self, generation: Generation, request_id: str) -> Sequence[Action | _CountPlaced]:
        attempts, now = generation.machine.attempts, self._clock()
        if request_id not in attempts.queued():
            return ()
        placement = None
        if attempts.may_be_placed(request_id, now):
            placement = find_nodes(self._cluster, generation.machine, request_id, now)
        if placement is None:
            error, num_tokens = attempts.live[request_id].error, generation.machine.spec.most_tokens
            if attempts.live[request_id].is_precise and error and self._cluster.lacks_precise_kv(num_tokens):
                return generation.machine.abort(error)
            self.waiting[request_id] = generation
            return ()
        if generation.placement is None:
            generation.placement, generation.placed_at = placement, now
        self._note_placement(generation.story, placement, now)
        is_first = attempts.live[request_id].number == 1
        count = _CountPlaced(placement.reason, is_first, now - generation.started_at)
        return [*generation.machine.placed(request_id, placement, now), count]

    def _note_placement(self, story: RequestStory, placement: Placement, now: float) -> None:
        prefill = None if placement.prefill is None else placement.prefill.node_id
        story.placed(now, prefill, placement.primary.node_id, placement.reason)
        if prefill is not None:
            self._recent.flowed(prefill, placement.primary.node_id, story.num_prompt_tokens)

    def _count(self, placed: _CountPlaced) -> None:
        if placed.is_first:
            self._metrics.model.queue_s.observe(placed.queue_s)
        else:
            self._metrics.retries.inc()
        self._metrics.placements.labels(placed.reason).inc()

    def _end(self, generation: Generation, outcome: Finish | Fail) -> None:
        machine = generation.machine
        model, now = self._metrics.model, self._clock()
        model.e2e_s.observe(now - generation.started_at)
        model.prompt_length.observe(generation.plan.num_prompt_tokens)
        num_tokens = sum(sample.num_tokens for sample in generation.samples)
        model.output_length.observe(num_tokens)
        error = outcome.error if isinstance(outcome, Fail) else None
        ending = "finished" if error is None else error.code or error.type
        generation.story.end(now, ending, num_tokens, machine.num_cached_tokens, max(generation.last_token_at))
        self._metrics.count_promise(generation.story.kept_promise)
        self._metrics.cached_tokens.inc(machine.num_cached_tokens)
        self._metrics.ends.labels(ending).inc()
        if error is None:
            for sample in generation.samples:
                if sample.finish_reason is not None:  # None: of a pooled prompt
                    model.success[sample.finish_reason].inc()
            generation.listener.finished(generation.prompt_index)
        else:
            is_of_nodes = isinstance(error, NoNodeError | NodeFailedError)
            if is_of_nodes and (why := self._cluster.why_none_takes(machine.spec.most_tokens)):
                error.add(f": {why}")
            generation.listener.failed(generation.prompt_index, error)


def note_answer(story: RequestStory, node: NodeKey, message: RequestMessage, now: float) -> None:
    """Notes what a node says about a request, besides its tokens."""
    if isinstance(message, Accepted):
        story.note(now, "accepted", node=node.node_id, cached=message.num_cached_tokens)
    elif isinstance(message, RequestFailed):
        story.note(now, "refused", node=node.node_id, code=message.code, why=message.message)
    elif isinstance(message, Migrated):
        story.note(now, "left" if not message.reason else "stayed", node=node.node_id, why=message.reason)
