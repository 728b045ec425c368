"""Puts together the parts of a role's logic, from a loaded model and a node's options."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import KVConnectorScheduler, LowerTiers
from tandem.engine.scheduling.prompt_order import ArrivalOrder, PromptOrder, SlackOrder
from tandem.engine.scheduling.scheduler import OnPrompts, Scheduler
from tandem.engine.scheduling.speculation.speculator import Guesser
from tandem.engine.scheduling.work.leaning import OwnLeaning
from tandem.node.adapters import nothing_held
from tandem.node.handoffs import Handoffs
from tandem.node.requests import RequestBook
from tandem.node.serving import ServingNode
from tandem.node.setup import LoadedModel, has_deadlines

MEASURED_BESIDE_DECODES = 256  # prompt tokens over which the time of one is measured


def make_clock(role: str, by_deadline: bool) -> StepClock:
    """`by_deadline`: prompts go so, and the clock foretells who makes it, by size: a short one's time, of which most is
    its launch, must not count as much as a long one's."""
    if role == "prefill":
        return StepClock(time.monotonic, by_size=False)
    if by_deadline:
        return StepClock(time.monotonic)
    # Beside decodes prompts get a few tokens in each step, and the time of those changes with the decodes.
    return StepClock(time.monotonic, measured_tokens=MEASURED_BESIDE_DECODES)


@dataclass(frozen=True)
class NodeContext:
    """The parts of a role's logic. `clock` is told of every step, `tiers` are those below the pool, `whole_up_to`
    (tokens) is explained at PushedPrompts."""

    options: NodeOptions
    info: NodeInfo
    keys: ClusterKeys
    pool: BlockPool
    loaded: LoadedModel
    clock: StepClock
    tiers: LowerTiers
    whole_up_to: int
    is_settled: Callable[[int], bool]  # NodeTransports.is_settled
    precise: Scheduler | None = None  # of the engine beside, node/precise/engine.py
    on_prompts: OnPrompts = lambda prompts, seconds: None  # Scheduler's
    guesser: Guesser | None = None  # Scheduler's

    def make_node(self, kind: type[ServingNode], pushes_prompts: bool) -> ServingNode:
        """Makes the logic of a node. With `pushes_prompts`, prompts in mode "prefill" are handed over while they are
        computed."""
        handoffs = Handoffs(
            self.info,
            self.keys,
            self.pool,
            self.options,
            self.tiers,
            self.clock.prompt_rate,
            self.is_settled,
            self.whole_up_to,
        )
        scheduler = self._make_scheduler(handoffs.source.prompts if pushes_prompts else None, handoffs)
        max_queue = self.options.scheduler.max_queue
        leaning = OwnLeaning(self.options.leaning or "unified", self.clock.now())
        adapters = self.loaded.adapters
        held = nothing_held if adapters is None else adapters.store.held
        more = self.precise, leaning, held
        return kind(self.info, self._make_book(), scheduler, self.pool, max_queue, handoffs, *more)

    def _make_book(self) -> RequestBook:
        config, media = self.loaded.config, self.loaded.model.media_encoder
        kinds = frozenset({"encoder"} if config.encoder else () if media is None else media.kinds)
        return RequestBook(config.vocab_size, self.loaded.max_model_len, self.pool.shares, kinds, config.encoder)

    def _make_scheduler(self, connector: KVConnectorScheduler | None, handoffs: Handoffs) -> Scheduler:
        cache, loaded = self.options.cache, self.loaded
        identity_key = loaded.identity.key()
        return Scheduler(
            SchedulerState(
                self.options.scheduler,
                self.pool,
                block_size=cache.block_size,
                max_model_len=loaded.max_model_len,
                eos_token_ids=loaded.config.eos_token_ids,
                root_for_salt=lambda salt: root_hash(identity_key, salt),
                hash_block_size=cache.hash_block_size,
                limits_prompt_work=self.options.role != "prefill",
                connector=connector,
                prompt_order=self._prompt_order(),
                tiers=handoffs.puller,
                shares=handoffs.shares,
                clock=self.clock,
                num_adapter_slots=0 if loaded.adapters is None else loaded.adapters.num_slots,
            ),
            self.on_prompts,
            self.guesser,
        )

    def _prompt_order(self) -> PromptOrder:
        target_s = self.options.scheduler.ttft_target_ms / 1e3
        return SlackOrder(target_s, self.clock) if has_deadlines(self.options) and target_s else ArrivalOrder()
