"""A node's tiers as a whole: sizes from the options, the manager, the threads behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import NodeOptions
from tandem.engine.errors import ConfigError
from tandem.engine.interfaces import BlockEvent
from tandem.engine.kv_pool import free_host_bytes
from tandem.kv_connector.tiers.host import HostTier, allocate_host_pool, block_bytes
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.tiers.manager import TierManager

logger = logging.getLogger(__name__)
CPU_NODE_BYTES = 256 << 20
GPU_NODE_SHARE, GPU_NODE_BYTES = 0.25, 32 << 30
BATCH_BYTES = 32 << 20  # copied by one job: enough for full speed, little enough to choose the next ones late
MAX_BATCH_BLOCKS = 64


def make_tiers(
    options: NodeOptions, pool: BlockPool, tensor: torch.Tensor, post: Callable[[JobDone], None]
) -> NodeTiers | None:
    """None where there is nothing to keep or no room. `post` brings results to the step loop."""
    if not pool.enable_caching or options.tensor_parallel_size > 1:
        return None
    num_host = host_tier_bytes(options, tensor.is_cuda) // block_bytes(tensor)
    if not num_host:
        return None
    try:
        host = HostTier(tensor, allocate_host_pool(tensor, num_host), post)
    except ConfigError as error:
        if options.cache.host_tier_bytes > 0:
            raise
        logger.warning("serving without a host tier: %s", error)
        return None
    batch = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes(tensor)))
    block_size = tensor.shape[4]
    manager = TierManager(pool, block_size, TierIndex(num_host), None, host.step_load, batch)
    return NodeTiers(manager, host)


def host_tier_bytes(options: NodeOptions, on_gpu: bool) -> int:
    given = options.cache.host_tier_bytes
    if given >= 0:
        return given
    return free_host_bytes(GPU_NODE_SHARE, GPU_NODE_BYTES) if on_gpu else free_host_bytes(most=CPU_NODE_BYTES)


class NodeTiers:
    """On the step loop, but for the constructor's `post`."""

    def __init__(self, manager: TierManager, host: HostTier) -> None:
        self.manager = manager
        self._host = host

    def warm_up(self) -> None:
        self._host.warm_up()

    def after_turn(self, pool_events: Sequence[BlockEvent], is_idle: bool) -> list[BlockEvent]:
        """Lets the manager look and hands its jobs to the threads. Returns what the directory is to hear."""
        self.manager.on_turn(pool_events, is_idle)
        for job in self.manager.drain_jobs():
            assert isinstance(job, Save | Load)
            self._host.submit(job)
        return self.manager.drain_events()

    def counters(self) -> dict[str, float]:
        return {**self.manager.counts(), **self._host.counters}

    def close(self) -> None:
        self._host.close()
