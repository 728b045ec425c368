"""Carries out what the request machines decide: places, sends, turns tokens into text, tells the listeners.

One per router process, on its event loop. It holds no policy of its own: order and retries are the machine's, the
choice of nodes is placement's, text is the samples'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import NoNodeError, OverloadedError, TandemError, UnavailableError
from tandem.engine.contracts.generation_config import SamplingDefaults
from tandem.engine.contracts.wire.requests import Cancel, Tokens
from tandem.engine.process.process_log import RateLimited
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.link import RequestMessage
from tandem.router.nodes.orphans import Orphans, Work
from tandem.router.placing.placement import PlacementRequest
from tandem.router.placing.policies import Choice
from tandem.router.placing.view import NodeKey
from tandem.router.requests.actions import Action, EmitPromptLogprobs, EmitTokens, Fail, Finish, Moved, Place, Send
from tandem.router.requests.generation import Generation, GenerationFactory, GenerationListener
from tandem.router.requests.metrics import RouterMetrics
from tandem.router.requests.placing import find_nodes
from tandem.router.requests.rebalancer import Rebalancer
from tandem.router.requests.token_times import TokenTimes
from tandem.router.text.api_keys import Tenant
from tandem.router.text.completion import ModelFacts, PromptPlan, check_model, plan_prompts
from tandem.router.text.openai_api import CompletionBody, parse_body, parse_prompts
from tandem.router.text.privacy import Privacy
from tandem.router.text.prompt_encoder import PromptEncoder
from tandem.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)


class CompletionService:
    def __init__(
        self,
        options: RouterOptions,
        cluster: Cluster,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        privacy: Privacy,
        defaults: SamplingDefaults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._privacy, self._defaults = privacy, defaults
        self.options, self.cluster, self.tokenizer, self.metrics = options, cluster, tokenizer, metrics
        self.encoder = PromptEncoder(tokenizer)
        self._factory = GenerationFactory(options, tokenizer)
        self._clock = clock
        self._active: set[Generation] = set()
        self._by_id: dict[str, Generation] = {}
        self._waiting: dict[str, Generation] = {}  # sub-request id -> its generation, without a node
        self._orphans = Orphans()
        self._times = TokenTimes(metrics)
        self._migrations = Rebalancer(options, cluster, self._carry_out)
        cluster.on_up, cluster.on_lost = self._on_up, self._on_lost
        cluster.on_message, cluster.on_room = self._on_message, self._on_room

    @property
    def num_active(self) -> int:
        """Prompts whose end, cancels included, is not yet known to every node."""
        return len(self._active)

    def facts(self) -> ModelFacts:
        """Raises UnavailableError while no node has said yet what is served."""
        if self.cluster.facts is None:
            raise UnavailableError(f"no node is connected yet ({self.cluster.missing()})")
        return self.cluster.facts

    async def plan(self, raw: bytes, tenant: Tenant) -> tuple[CompletionBody, list[PromptPlan]]:
        """Validates and tokenizes a body. Raises InvalidRequestError, ModelNotFoundError or UnavailableError."""
        body = parse_body(CompletionBody, raw)
        prompts = parse_prompts(body.prompt)
        facts = self.facts()
        check_model(body.model, facts)
        prompt_ids = await self.encoder.encode(prompts, len(raw), facts)
        plans = plan_prompts(body, prompts, prompt_ids, facts, self._defaults)
        return body, [self._privacy.apply(plan, tenant, body.cache_salt or "") for plan in plans]

    def start(
        self,
        completion_id: str,
        body: CompletionBody,
        plans: Sequence[PromptPlan],
        listener: GenerationListener,
        session: str = "",
    ) -> list[Generation]:
        """Sends every prompt on its way. Raises OverloadedError when too many wait for a node already."""
        if len(self._waiting) + len(plans) > self.options.max_queue and self._waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting for a node; try again later")
        names = [completion_id] if len(plans) == 1 else [f"{completion_id}-p{i}" for i in range(len(plans))]
        generations = [
            self._factory.make(name, i, body, plan, listener, self._clock(), session)
            for i, (name, plan) in enumerate(zip(names, plans, strict=True))
        ]
        try:
            for generation in generations:
                self._active.add(generation)
                self._carry_out(generation, generation.machine.start())
                self.metrics.prompt_tokens.inc(len(generation.plan.token_ids))
        except Exception:  # our own fault: nobody listens, so nothing of it may go on
            self.abort(generations, TandemError("the request could not be started"))
            raise
        self.metrics.active.set(len(self._active))
        return generations

    def offers(self, request: PlacementRequest, plan: PromptPlan) -> list[Choice]:
        """What each node would cost now, cheapest first; nothing is placed."""
        return self.cluster.offers(request, self.cluster.hash_prompt(plan.token_ids, plan.secrecy), self._clock())

    def abort(self, generations: Sequence[Generation], error: TandemError) -> None:
        """Ends what is still under way, on every node."""
        for generation in generations:
            self._carry_out(generation, generation.machine.abort(error))

    def abort_all(self, error: TandemError) -> None:
        self.abort(list(self._active), error)

    def tick(self) -> None:
        """Each part, and each request, by itself: deadlines hold whatever else fails."""
        now = self._clock()
        self._try("the nodes", self.cluster.tick, now)
        for generation in list(self._active):
            try:
                actions = generation.machine.tick(now)
                if actions:
                    self._carry_out(generation, actions)
            except Exception:
                self._give_up(generation)
        self._try("migrations", self._migrations.tick, self._active, now)

    @staticmethod
    def _try(what: str, tick: Callable[..., None], *arguments: object) -> None:
        try:
            tick(*arguments)
        except Exception:
            repeated.exception("a tick of %s failed", what)

    def check_integrity(self) -> None:
        for generation in self._active:
            generation.machine.check_integrity()
            assert not generation.machine.closed, "a closed generation is still active"
        assert set(self._by_id.values()) <= self._active
        assert set(self._waiting.values()) <= self._active

    # --- events of the cluster --------------------------------------------------------------------------------

    def _on_message(self, node: NodeKey, message: RequestMessage) -> None:
        now = self._clock()
        if isinstance(message, Tokens):
            self._on_tokens(node, message, now)
            return
        generation = self._by_id.get(message.request_id)
        if generation is not None:
            try:
                self._carry_out(generation, generation.machine.answered(node, message, now))
            except Exception:
                self._give_up(generation)

    def _on_tokens(self, node: NodeKey, message: Tokens, now: float) -> None:
        self._times.begin(now)
        for delta in message.deltas:
            generation = self._by_id.get(delta.request_id)
            if generation is None:
                self.metrics.dropped_deltas.inc()
                continue
            machine = generation.machine
            dropped = machine.num_dropped_deltas
            try:
                actions = machine.tokens(node, delta, now)
                if machine.num_dropped_deltas != dropped:
                    self.metrics.dropped_deltas.inc()
                self._carry_out(generation, actions)
            except Exception:
                self._give_up(generation)
        self._times.end()

    def _on_up(self, node: NodeKey) -> None:
        """A node whose connection broke, and that lives, must not go on with attempts that were given up."""
        for request_id, attempt in self._orphans.returned(node):
            self.cluster.send(node, Cancel(request_id=request_id, attempt=attempt), self._clock())

    def _on_lost(self, node: NodeKey, reason: str) -> None:
        self.metrics.nodes_lost.inc()
        now = self._clock()
        orphans: Work = set()
        for generation in list(self._active):
            try:
                orphans |= generation.machine.work_on(node)
                self._carry_out(generation, generation.machine.node_lost(node, reason, now))
            except Exception:
                self._give_up(generation)
        self._orphans.lost(node, orphans)

    def _on_room(self) -> None:
        for request_id, generation in list(self._waiting.items()):
            try:
                self._carry_out(generation, [Place(request_id)])
            except Exception:
                self._give_up(generation)

    def _give_up(self, generation: Generation) -> None:
        """In the handler of an exception that nobody expected: it costs this request, and no other."""
        request_id = generation.machine.spec.request_id
        repeated.exception("request %s failed by an error of this router", request_id)
        error = TandemError("the server made an error; its log says more", request_id=request_id)
        try:
            was_over = generation.machine.outcome is not None  # then nobody told the listener so
            self._carry_out(generation, generation.machine.abort(error))
            if was_over:
                generation.listener.failed(generation.prompt_index, error)
        except Exception:
            repeated.exception("request %s can't be cancelled either; it is forgotten", request_id)
            self._forget(generation)
            try:
                generation.listener.failed(generation.prompt_index, error)
            except Exception:
                repeated.exception("request %s: nobody can be told", request_id)

    # --- actions ----------------------------------------------------------------------------------------------

    def _carry_out(self, generation: Generation, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, EmitTokens):
                self._emit(generation, action)
            elif isinstance(action, Send):
                self._send(generation, action)
            elif isinstance(action, Moved):
                generation.moved_samples.add(action.sample_index)
            elif isinstance(action, Place):
                self._place(generation, action.request_id)
            elif isinstance(action, EmitPromptLogprobs):
                generation.listener.prompt_logprobs(generation.prompt_index, action.entries)
            else:
                self._end(generation, action)
        if generation.machine.closed:
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._active.discard(generation)
        for request_id in generation.submitted_ids:
            self._by_id.pop(request_id, None)
        for request_id in [key for key, waiting in self._waiting.items() if waiting is generation]:
            del self._waiting[request_id]
        self.metrics.active.set(len(self._active))

    def _emit(self, generation: Generation, action: EmitTokens) -> None:
        sample = generation.samples[action.sample_index]
        piece = sample.feed(action)
        if piece is None:
            return
        self._times.count(generation, action.sample_index, len(piece.token_ids))
        generation.listener.piece(generation.prompt_index, action.sample_index, piece)
        if sample.stopped:
            self._carry_out(generation, generation.machine.stop_sample(action.sample_index))

    def _send(self, generation: Generation, action: Send) -> None:
        generation.submitted_ids.add(action.message.request_id)
        self._by_id[action.message.request_id] = generation
        now = self._clock()
        if not self.cluster.send(action.node, action.message, now):
            self._carry_out(generation, generation.machine.node_lost(action.node, "it is not connected", now))

    def _place(self, generation: Generation, request_id: str) -> None:
        machine = generation.machine
        self._waiting.pop(request_id, None)
        if request_id not in machine.attempts.queued():
            return
        placed = machine.attempts.may_be_placed(request_id, self._clock()) and self._find_nodes(generation, request_id)
        if not placed:
            self._waiting[request_id] = generation

    def _find_nodes(self, generation: Generation, request_id: str) -> bool:
        machine, now = generation.machine, self._clock()
        placement = find_nodes(self.cluster, machine, request_id, now)
        if placement is None:
            return False
        is_first = machine.attempts.live[request_id].number == 1
        generation.placement = generation.placement or placement
        self._carry_out(generation, machine.placed(request_id, placement, now))
        # Counting can wait until it is under way.
        if is_first:
            self.metrics.queue_s.observe(now - generation.started_at)
        else:
            self.metrics.retries.inc()
        self.metrics.placements.labels(placement.reason).inc()
        return True

    def _end(self, generation: Generation, outcome: Finish | Fail) -> None:
        machine = generation.machine
        self.metrics.e2e_s.observe(self._clock() - generation.started_at)
        self.metrics.cached_tokens.inc(machine.num_cached_tokens)
        if isinstance(outcome, Finish):
            self.metrics.ends.labels("finished").inc()
            generation.listener.finished(generation.prompt_index)
        else:
            error = outcome.error
            if isinstance(error, NoNodeError) and (missing := self.cluster.missing_roles()):
                error.message += f": {missing} is connected"
            self.metrics.ends.labels(error.code or error.type).inc()
            generation.listener.failed(generation.prompt_index, error)
