"""A node's tiers as a whole: sizes from the options, the manager, the threads behind it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.engine.device.kv_pool import free_host_bytes
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.tiers.disk import DiskTier
from tandem.kv_connector.tiers.disk_file import DiskFile
from tandem.kv_connector.tiers.host import HostTier
from tandem.kv_connector.tiers.host_blocks import ExactBlocks, Fp8Blocks, HostBlocks
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.tiers.manager import TierManager
from tandem.node.pool import NodePool
from tandem.node.serving import ServingNode
from tandem.node.setup import LoadedModel

logger = logging.getLogger(__name__)
CPU_NODE_BYTES, GPU_NODE_BYTES = 256 << 20, 16 << 30  # guesses
# Bytes copied by one job: little enough to choose the next ones late, enough for full speed though few turns of the
# step loop come between the launches of long prompts, and each starts one.
BATCH_BYTES = 256 << 20  # a guess; see docs/measurements.md#conversations-over-tiers
MAX_BATCH_BLOCKS = 64  # a guess


def make_tiers(
    options: NodeOptions,
    pool: BlockPool,
    memory: NodePool,
    loaded: LoadedModel,
    compute_rate: Rate,
    post: Callable[[JobDone], None],
    kept: KeptElsewhere | None,
) -> NodeTiers | None:
    """Makes a node's tiers of whole blocks, whatever the number of ranks; None where there is nothing to keep or no
    room. `post` brings results to the step loop, `kept` knows what peers keep. Raises ConfigError."""
    wants_disk = options.cache.disk_tier_bytes > 0
    if wants_disk and not options.cache.disk_tier_dir:
        raise ConfigError("--disk-tier-bytes without --disk-tier-dir: say where")
    if options.cache.disk_tier_dir and not wants_disk:
        raise ConfigError("--disk-tier-dir without --disk-tier-bytes: say how much of the disk is for it")
    if not pool.enable_caching:
        return None
    kind = Fp8Blocks if compresses(options, memory.tensor) else ExactBlocks
    whole = memory.tensor if memory.ranks is None else memory.ranks.new_blocks(1)
    each = memory.layout.group.blocks_each
    num_host = host_tier_bytes(options, whole.is_cuda) // (each * kind.slot_bytes(whole))
    if not num_host:
        if wants_disk:
            raise ConfigError(
                "--disk-tier-bytes without a host tier for blocks to pass through: raise --host-tier-bytes"
            )
        return None
    try:
        host = HostTier(memory.tensor, kind(whole, num_host, each), post, memory.ranks)
    except ConfigError as error:
        if wants_disk or options.cache.host_tier_bytes > 0:
            raise
        logger.warning("serving without a host tier: %s", error)
        return None
    file = open_disk_file(options, host.blocks, loaded, memory.layout) if wants_disk else None
    return NodeTiers(pool, host, file, compute_rate, post, kept, has_ranks=options.tensor_parallel_size > 1)


def compresses(options: NodeOptions, pool: Tensor) -> bool:
    """Whether blocks are compressed on their way to the host. Not from a pool of fp8, which is as small already."""
    return options.cache.host_tier_dtype == "fp8_e4m3" and pool.dtype != FP8_DTYPE


def open_disk_file(options: NodeOptions, blocks: HostBlocks, loaded: LoadedModel, layout: KVLayout) -> DiskFile:
    """Opens a file for blocks of this model in this layout, stored like this, only."""
    depends_on = msgspec.msgpack.encode((loaded.identity.key(), layout, type(blocks).__name__))
    cache = options.cache
    identity = hashlib.sha256(depends_on).digest()
    file = DiskFile(Path(cache.disk_tier_dir), cache.disk_tier_bytes, blocks.raw.shape[1], identity)
    if not file.num_slots:
        raise ConfigError(f"--disk-tier-bytes {cache.disk_tier_bytes} is less than one block: raise it")
    return file


def host_tier_bytes(options: NodeOptions, on_gpu: bool) -> int:
    """The size of the host tier: as asked for, else so that several nodes can start on one host at the same time."""
    given = options.cache.host_tier_bytes
    if given >= 0:
        return given
    return free_host_bytes(1 / 16, GPU_NODE_BYTES) if on_gpu else free_host_bytes(most=CPU_NODE_BYTES)


def take_copied(manager: TierManager, logic: ServingNode, done: JobDone) -> None:
    """Takes in what a thread has copied, and answers peers that wait for it: the next turn may be a step away."""
    manager.on_done(done)
    logic.helper.on_tick(not logic.draining)


class NodeTiers:
    """A node's tiers, used by the step loop, but for `post`, which the threads call."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        file: DiskFile | None,
        compute_rate: Rate,
        post: Callable[[JobDone], None],
        kept: KeptElsewhere | None = None,
        has_ranks: bool = False,
    ) -> None:
        """`has_ranks`: other ranks compute as well, and wait for nothing that comes under a step."""
        self._host = host
        self._disk = None if file is None else DiskTier(host.blocks, file, post)
        num_host, shares = len(host.blocks), pool.shares
        host_index = TierIndex(num_host, lambda tenant: shares.quota(tenant, num_host))
        disk_index = None
        if file is not None:
            num_disk = file.num_slots
            disk_index = TierIndex(num_disk, lambda tenant: shares.quota(tenant, num_disk))
        batch = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // host.blocks.raw.shape[1]))
        block_size, step_load = host.pool.shape[4], None if has_ranks else host.step_load
        parts = pool, block_size, host_index, disk_index, step_load, compute_rate, batch, kept
        self.manager = TierManager(*parts, clock=time.monotonic)
        if file is not None:
            self.manager.restore(file.restored())

    @property
    def num_host_blocks(self) -> int:
        return len(self._host.blocks)

    def warm_up(self) -> None:
        self._host.warm_up()

    def after_turn(self, pool_events: Sequence[BlockEvent], is_idle: bool) -> list[BlockEvent]:
        """Lets the manager look and hands its jobs to the threads. Returns what the directory is to hear."""
        self.manager.on_turn(pool_events, is_idle)
        for job in self.manager.drain_jobs():
            if isinstance(job, Save | Load):
                self._host.submit(job)
            else:
                assert self._disk is not None
                self._disk.submit(job)
        return self.manager.drain_events()

    def counters(self) -> dict[str, float]:
        disk = {} if self._disk is None else self._disk.counters
        return {**self.manager.counts(), **self._host.counters, **disk}

    def close(self) -> None:
        self._host.close()
        if self._disk is not None:
            self._disk.close()
