"""What a role's logic is made of, put together from a loaded model and a node's options."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import NodeOptions
from tandem.engine.hashing import root_hash
from tandem.engine.interfaces import KVConnectorScheduler, LowerTiers
from tandem.engine.messages import NodeInfo
from tandem.engine.node_setup import LoadedModel
from tandem.engine.prompt_order import ArrivalOrder, PromptOrder, SlackOrder
from tandem.engine.request_book import RequestBook
from tandem.engine.scheduler import Scheduler
from tandem.engine.security import ClusterKeys
from tandem.kv_connector.sink import SinkManager
from tandem.kv_connector.source import SourceManager


@dataclass(frozen=True)
class NodeContext:
    """`tiers` is None where there are none below the pool."""

    options: NodeOptions
    info: NodeInfo
    keys: ClusterKeys
    pool: BlockPool
    loaded: LoadedModel
    tiers: LowerTiers | None
    is_settled: Callable[[int], bool]  # NodeTransports.is_settled

    def make_source(self) -> SourceManager:
        return SourceManager(self.info, self.keys, self.pool, self.options)

    def make_sink(self) -> SinkManager:
        return SinkManager(self.info, self.keys, self.pool, self.options, self.is_settled)

    def make_book(self) -> RequestBook:
        cache, loaded = self.options.cache, self.loaded
        return RequestBook(
            loaded.config.vocab_size, loaded.max_model_len, cache.block_size, cache.hash_block_size, self.pool.shares
        )

    def make_scheduler(self, connector: KVConnectorScheduler | None, tiers: LowerTiers | None) -> Scheduler:
        """`connector` for prompts that are handed over while they are computed."""
        cache, loaded = self.options.cache, self.loaded
        identity_key = loaded.identity.key()
        return Scheduler(
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
            tiers=tiers,
        )

    def _prompt_order(self) -> PromptOrder:
        target_ms = self.options.scheduler.ttft_target_ms
        if self.options.role != "prefill" or not target_ms:
            return ArrivalOrder(time.monotonic)
        return SlackOrder(target_ms / 1e3, time.monotonic)
