"""Completions: bodies become prompts, and prompts become requests that are under way until they end or are aborted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from tandem.engine.contracts.generation_config import SamplingDefaults
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.process.process_log import RateLimited
from tandem.router.access.api_keys import Tenant
from tandem.router.media.parts import expanded, named_parts
from tandem.router.media.reader import MediaReader
from tandem.router.metrics.router_metrics import RouterMetrics
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.leaner import Leaner
from tandem.router.placing.elastic import Plan
from tandem.router.placing.placement import PlacementRequest
from tandem.router.placing.policies import Choice
from tandem.router.recent.ring import RecentRequests
from tandem.router.requests.dispatcher import Dispatcher
from tandem.router.requests.generation import Generation, GenerationFactory, GenerationListener
from tandem.router.requests.rebalancer import Rebalancer
from tandem.router.structured.answer import answer_of
from tandem.router.structured.checker import GrammarChecker
from tandem.router.structured.spelling import Spelling
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.completion import (
    DEFAULT_MAX_TOKENS,
    ModelFacts,
    PromptPlan,
    banned_ids,
    check_model,
    check_task,
    cut_side,
    encoder_plan,
    held_to,
    plan_prompts,
    truncated,
    with_adapter,
)
from tandem.router.text.openai_api import CompletionBody, Prompts, parse_prompts
from tandem.router.text.privacy import Privacy
from tandem.router.text.prompt_encoder import PromptEncoder
from tandem.router.text.request_headers import RequestHeaders
from tandem.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
repeated = RateLimited(logger)

NOTHING_SAID = RequestHeaders()
LOOK_FOR_FACTS_S = 0.02  # a guess: nobody notices it at a router's start
LOOK_AGAIN_S = 0.5  # a guess: when it has waited for seconds; a thousand that wait for minutes cost a router little


class CompletionService:
    """What HTTP asks for, done; one per router process, on its event loop. `Dispatcher` has what is under way."""

    def __init__(
        self,
        options: RouterOptions,
        cluster: Cluster,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        privacy: Privacy,
        defaults: SamplingDefaults,
        media: MediaReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._privacy, self._defaults = privacy, defaults
        self.options, self.cluster, self.tokenizer, self.metrics = options, cluster, tokenizer, metrics
        self.encoder, self.bodies = PromptEncoder(tokenizer), BodyReader(options.strict_requests)
        self.grammars, self._spelling = GrammarChecker(tokenizer.folder), Spelling(tokenizer.mark_ids)
        self._factory = GenerationFactory(options, tokenizer)
        self.media = media
        self._clock = clock
        self.num_awaiting_facts = 0  # requests that came before any node
        self.recent = RecentRequests()
        self._dispatcher = Dispatcher(cluster, metrics, self.recent, clock)
        self._leaner = Leaner(cluster)
        self._rebalancer = Rebalancer(options, cluster, self._dispatcher.carry_out)

    def connect(self) -> None:
        """Connects to the nodes, whose events are handled from here on."""
        self.cluster.start(self._dispatcher)

    @property
    def num_active(self) -> int:
        """Prompts whose end, cancels included, is not yet known to every node."""
        return len(self._dispatcher.active)

    @property
    def num_waiting(self) -> int:
        """Sub-requests that no node has taken yet."""
        return len(self._dispatcher.waiting)

    def facts(self) -> ModelFacts:
        """What is known of the served model. Raises UnavailableError while no node has said what is served."""
        if self.cluster.model.facts is None:
            raise UnavailableError(f"no node is connected yet ({self.cluster.missing()})")
        return self.cluster.model.facts

    async def awaited_facts(self, name: str | None = None) -> ModelFacts:
        """The facts of the first node, once it has read the adapter called `name`, if that is a listed one. A client
        waits for it as long as for a node that takes its request: a process that has just come to a shared port would
        otherwise turn away what the others could have served. Raises UnavailableError when none comes, OverloadedError
        when too many wait already."""
        if self._lacks(name):
            if self.num_awaiting_facts >= self.options.max_queue:
                raise OverloadedError(f"{self.num_awaiting_facts} requests are waiting for a node; try again later")
            end = self._clock() + (self.options.node_wait_s or self.options.timeouts.connect_s)
            self.num_awaiting_facts += 1
            pause_s = LOOK_FOR_FACTS_S
            try:
                while self._lacks(name) and self._clock() < end:
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.2 * pause_s, LOOK_AGAIN_S)
            finally:
                self.num_awaiting_facts -= 1
        return self.facts()

    def _lacks(self, name: str | None) -> bool:
        facts = self.cluster.model.facts
        return facts is None or (name is not None and name not in facts.names and self.cluster.adapters.is_unread(name))

    async def plan(self, raw: bytes, tenant: Tenant) -> tuple[CompletionBody, list[PromptPlan]]:
        """Validates and tokenizes a body of /v1/completions. Raises InvalidRequestError, ModelNotFoundError,
        UnavailableError or OverloadedError."""
        body = self.bodies.read(CompletionBody, raw)
        prompts = parse_prompts(body.prompt)
        facts = await self.awaited_facts(body.model)
        self.adapter_of(body.model, facts)
        check_task(facts, "generate")
        adds = body.add_special_tokens is not False
        prompt_ids = await self.encoder.encode(prompts, len(raw), facts, adds, cut_side(body))
        items: tuple[MediaItem, ...] = ()
        if body.multi_modal_data:
            prompt_ids, items = await self._with_media(body, prompt_ids, facts)
        plans = self.plan_prompts(body, prompts, prompt_ids, tenant)
        if items:
            plans = [replace(plan, media=items) for plan in plans]
        if (answer := answer_of(body, self._spelling)) is not None:
            plans = held_to(plans, await self.grammars.check([answer.part], answer.param))
        return body, plans

    async def _with_media(
        self, body: CompletionBody, prompt_ids: list[list[int]], facts: ModelFacts
    ) -> tuple[list[list[int]], tuple[MediaItem, ...]]:
        """The one prompt, with a span for each of its placeholders, and what the spans hold. Raises
        InvalidRequestError."""
        assert body.multi_modal_data
        try:
            if len(prompt_ids) > 1 or body.truncate_prompt_tokens is not None:
                raise InvalidRequestError("images and sounds are of one prompt, and with the whole of it")
            parts = named_parts(body.multi_modal_data)
            media = await self.media.read([{"content": parts}], facts)
            if media is None:
                raise InvalidRequestError(f"{facts.name} takes text alone" if parts else "it names nothing")
            ids, items = expanded(prompt_ids[0], media)
        except InvalidRequestError as error:
            message = error.message if "multi_modal_data" in error.message else f"multi_modal_data: {error.message}"
            raise InvalidRequestError(message, param="multi_modal_data") from error
        return [ids], items

    def plan_prompts(
        self,
        body: CompletionBody,
        prompts: Prompts,
        prompt_ids: list[list[int]],
        tenant: Tenant,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[PromptPlan]:
        """One plan for each prompt. Raises InvalidRequestError and UnavailableError."""
        facts = self.facts()
        if body.truncate_prompt_tokens is not None:
            prompts = prompt_ids = [truncated(ids, body, self.tokenizer, facts) for ids in prompt_ids]
        banned = banned_ids(body.bad_words or (), self.tokenizer)
        plans = plan_prompts(body, prompts, prompt_ids, facts, self._defaults, default_max_tokens, banned)
        if body.skip_special_tokens is False:
            plans = [replace(plan, shown_ids=self.tokenizer.all_special_ids) for plan in plans]
        if (adapter := self.adapter_of(body.model, facts)) is not None:
            plans = [with_adapter(plan, adapter) for plan in plans]
        return [self._privacy.apply(plan, tenant, body.cache_salt or "") for plan in plans]

    def adapter_of(self, name: str | None, facts: ModelFacts) -> AdapterRef | None:
        """The adapter that clients call so; None: they mean the model itself. Raises ModelNotFoundError, and what
        `ServedAdapters.find` raises."""
        adapter = None if name is None or name in facts.names else self.cluster.adapters.find(name)
        if adapter is None:
            check_model(name, facts)
        return adapter

    def facts_of(self, name: str | None) -> ModelFacts:
        """The facts of the model, or of it with an adapter, by the name that a request gave."""
        facts = self.facts()
        return facts if name is None else replace(facts, name=name)

    def plan_sound(self, body: CompletionBody, item: MediaItem, begin: Sequence[int], tenant: Tenant) -> PromptPlan:
        """The plan of one window of sound; `begin` are the decoder's first tokens. Raises InvalidRequestError."""
        facts = self.facts()
        longest = facts.max_model_len if facts.encoder is None else facts.encoder.max_decoder_len
        plan = encoder_plan(item, begin, None, body, facts, SamplingDefaults(), longest)
        return self._privacy.apply(plan, tenant, "")

    def start(
        self,
        completion_id: str,
        body: CompletionBody,
        plans: Sequence[PromptPlan],
        listener: GenerationListener,
        said: RequestHeaders = NOTHING_SAID,
    ) -> list[Generation]:
        """Sends every prompt on its way. Raises OverloadedError when too many wait for a node already."""
        if self.num_waiting and self.num_waiting + len(plans) > self.options.max_queue:
            raise OverloadedError(f"{self.num_waiting} requests are waiting for a node; try again later")
        names = [completion_id] if len(plans) == 1 else [f"{completion_id}-p{i}" for i in range(len(plans))]
        generations = [
            self._factory.make(name, i, body, plan, listener, self._clock(), said)
            for i, (name, plan) in enumerate(zip(names, plans, strict=True))
        ]
        try:
            for generation in generations:
                self._dispatcher.start(generation)
                self.metrics.model.prompt_tokens.inc(generation.plan.num_prompt_tokens)
        except Exception:  # our own fault: nobody listens, so nothing of it may go on
            self.abort(generations, TandemError("the request could not be started"))
            raise
        self.metrics.active.set(self.num_active)
        return generations

    def offers(self, request: PlacementRequest, plan: PromptPlan) -> list[Choice]:
        """What each node would cost now, cheapest first; nothing is placed."""
        return self.cluster.offers(request, self.cluster.model.hash_prompt(plan.token_ids, plan.secrecy), self._clock())

    def plans(self, request: PlacementRequest, plan: PromptPlan) -> list[Plan]:
        """What the elastic rule would choose from now, cheapest first; nothing is placed."""
        return self.cluster.plans(request, self.cluster.model.hash_prompt(plan.token_ids, plan.secrecy), self._clock())

    def abort(self, generations: Sequence[Generation], error: TandemError) -> None:
        """Ends what is still under way, on every node."""
        for generation in generations:
            self._dispatcher.carry_out(generation, generation.machine.abort(error))

    def abort_all(self, error: TandemError) -> None:
        self.abort(list(self._dispatcher.active), error)

    def tick(self) -> None:
        """Judges deadlines and sends heartbeats. Each part, and each request, is on its own: deadlines hold whatever
        else fails."""
        now = self._clock()
        self._try("the nodes", self.cluster.tick, now)
        self._try("leanings", self._leaner.tick, now)
        self._dispatcher.tick(now)
        self.metrics.waiting.set(self.num_waiting + self.num_awaiting_facts)
        self._try("moves", self._rebalancer.tick, self._dispatcher.active, now)

    @staticmethod
    def _try(what: str, tick: Callable[..., None], *arguments: object) -> None:
        try:
            tick(*arguments)
        except Exception:
            repeated.exception("a tick of %s failed", what)

    def check_integrity(self) -> None:
        self._dispatcher.check_integrity()
